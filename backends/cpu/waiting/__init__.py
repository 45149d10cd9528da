"""Waiting of host ranks: polls, yields of the core, sleep until a bell rings.

In: a condition. Out: a return once it may hold, or the error of another rank.
"""
