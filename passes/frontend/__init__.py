"""Passes over the step as the user wrote it: derivatives, common and dead code, stored parameters.

In: a module in the phase `traced`. Out: the same module with gradients, and without unused ops.
"""
