"""Run schedules and scheduled programs on paper.

In: an order or a module, and costs. Out: when tasks or ops run, and the memory that they take.
"""
