"""From a graph to a Python function.

In: a piece, that is a graph and the state that it works on. Out: the body that a rank runs.
"""
