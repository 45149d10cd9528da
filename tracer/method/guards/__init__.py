"""Notice that what a trace relied on is no longer so.

In: what a trace has read of Python. Out: a check for every execution, and what it says of a change.
"""
