"""The search of `auto`: orders of tasks as short as memory allows, and a bound of how short.

In: a pipeline, costs and memory. Out: the best orders found, and what none can be shorter than.
"""
