"""The virtual world: all ranks in one process, the oracle of tests.

In: all ranks' programs. Out: what they return, or the cycle of a deadlock.
"""
