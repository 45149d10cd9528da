"""Rows that the data chooses, computed with static shapes.

In: the calls of a traced method whose shapes depend on data, and what it does with the rows. Out:
operators on all rows, each with the weights of its own class.
"""
