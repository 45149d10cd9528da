"""The search of `auto`: orders of tasks that are as short as memory allows, and a lower bound.

In: a pipeline, costs and memory. Out: the best orders found, and a bound that no order can beat.
"""
