"""Passes over the step as the user wrote it: derivatives, common and dead code, fusion.

In: a module in the phase `traced`. Out: the same with gradients, and with nothing that nobody uses.
"""
