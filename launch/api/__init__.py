"""What a user calls: `cg.trace`, `lower`, `compile`, and what they give.

In: a user's function and its arguments. Out: a compiled step.
"""
