"""Tensors of a run on fakes whose values are known all the same, since no input decides them.

In: the operators that are called, one after the other. Out: forms of them with shapes that are
static.
"""
