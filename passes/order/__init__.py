"""Passes that order the work of a step by a pipeline schedule.

In: a module in the phase `async`. Out: the module in the phase `scheduled`, with a linear program
for each rank.
"""
