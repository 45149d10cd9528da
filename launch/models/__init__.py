"""Models of other libraries, cut into the stages of a pipeline.

In: a module with a chain of layers. Out: stage modules, each with some of the layers.
"""
