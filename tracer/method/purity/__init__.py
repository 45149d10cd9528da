"""Run a method under make_fx, and refuse what a graph cannot keep.

In: a method, its actor and fake arguments. Out: one joint graph of its forward and, on request, of
its backward, and what the method has done to state.
"""
