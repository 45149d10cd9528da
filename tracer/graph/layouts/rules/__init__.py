"""The layout rules of aten ops: a module for each family of ops, and a table of all of them.

In: a `Case`, that is an op and the layouts of its operands. Out: an `Answer`, or an `Expansion`
into ops that have answers. `table.py` finds the rule of an op.
"""
