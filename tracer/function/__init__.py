"""From a call of the step to a function of the IR: what is called, its type, its effect.

In: a bound call. Out: a declaration that all ranks agree on, and on its own rank a body to run.
"""
