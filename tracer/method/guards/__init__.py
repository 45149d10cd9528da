"""Notice when something that a trace relied on has changed.

In: what a trace has read of Python. Out: a check for every execution, which says what has changed.
A change is an error that names it, never a new trace.
"""
