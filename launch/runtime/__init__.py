"""Bind a compiled module in a world.

In: a scheduled module and its bodies. Out: a runtime of steps, or the contexts of a driven graph.
"""
