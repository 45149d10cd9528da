"""Passes that decide where work is done, and bring values there.

In: a differentiated module. Out: the module in the phase `async`, with sends and receives instead
of transfers.
"""
