"""Compile the graphs of functions by one of torch's compilers, and layers that repeat once.

In: a traced graph, and the name of a compiler. Out: a function that computes the graph.
"""
