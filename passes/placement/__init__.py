"""Passes that decide where work is done, and bring values there.

In: a differentiated module. Out: one in the phase `async`, whose transfers are sends and receives.
"""
