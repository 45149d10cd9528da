"""Compile the graphs of functions as a whole, by one of torch's compilers.

In: a traced graph, and the name of a compiler. Out: a function that computes the graph.
"""
