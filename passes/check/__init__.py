"""Passes that prove a scheduled module free of deadlocks and races.

In: linear programs. Out: nothing, or an `IRError` that shows the cycle or the race.
"""
