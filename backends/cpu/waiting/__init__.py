"""How a host rank waits: polls, yields of its core, sleep until a bell rings.

In: a condition. Out: a return once it may hold, or the error of another rank.
"""
