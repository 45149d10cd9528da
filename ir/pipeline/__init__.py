"""Pipelines on paper: orders of tasks, the costs of tasks, and the times at which they run.

In: orders and costs. Out: a timeline on a virtual clock.
"""
