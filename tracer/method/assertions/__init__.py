"""Assertions on the values of tensors, which a trace does not know.

In: the calls of a traced method that need a value. Out: operators that check it in each execution.
"""
