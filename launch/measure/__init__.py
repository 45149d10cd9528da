"""Measure what calls and messages take, on paper and on the machine.

In: a compiled step. Out: costs, profiles, timelines.
"""
