"""Operators of routed tokens: products with the matrices of the experts that a router chooses.

In: tensors of a traced method, or of an execution. Out: their products, by kernels of static shape.
"""
