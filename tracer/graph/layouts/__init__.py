"""Layouts of what a method computes, and the graphs that each rank of its group runs.

In: a graph of aten ops at logical shapes, and the layouts of its inputs. Out: a layout for each
value, the transfers between values of other layouts (`propagate.py`), and parts without
communication, as graphs for each rank (`partition.py`). `rules/` says what each op does with
layouts.
"""
