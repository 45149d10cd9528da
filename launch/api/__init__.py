"""The functions that users call: `cg.trace`, `lower`, `compile`, and their results.

In: a user's function and its arguments. Out: a compiled step.
"""
