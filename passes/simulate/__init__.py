"""Run schedules and scheduled programs on paper.

In: an order or a module, and costs. Out: when each task or op runs, and the memory it takes.
"""
