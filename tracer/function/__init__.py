"""Turn a call that a step makes into a function of the IR, with its type and its effect.

In: a bound call. Out: a declaration that all ranks agree on, and a body on the ranks that run it.
"""
