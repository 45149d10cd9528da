"""Layouts of the values that a method computes, and the graphs that each rank of its mesh runs.

In: a graph of aten ops at logical shapes, and the layouts of its inputs. Out: a layout for each
value, the transfers from one layout to another (`propagation/propagate.py`), and parts without
communication, as graphs for each rank (`propagation/partition.py`). `rules/` says what each op
does with layouts.
"""
