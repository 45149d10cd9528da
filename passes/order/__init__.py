"""Passes that order the step's work by a pipeline schedule.

In: a module in the phase `async`. Out: one in the phase `scheduled`: a linear program
for each rank.
"""
