"""Facts about a module that several passes ask for.

In: a scheduled module. Out: what is over when, and which values are still needed.
"""
