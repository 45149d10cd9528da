"""Pipelines on paper: orders of tasks, what tasks cost, and when they run.

In: orders and costs. Out: a timeline on a virtual clock.
"""
