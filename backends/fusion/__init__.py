"""Compile the graphs of functions as a whole, by a compiler of torch's.

In: a traced graph, and the name of a compiler. Out: a body that does the same.
"""
