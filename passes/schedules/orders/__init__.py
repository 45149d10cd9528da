"""The order of tasks of each schedule, and the text form of tables of tasks.

In: a `Pipeline`. Out: an `Order`, the tasks of each rank.
"""
