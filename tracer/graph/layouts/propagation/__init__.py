"""Give each value of a graph a layout, and cut the graph where ranks exchange something.

In: a graph and the layouts of its inputs. Out: the parts that each rank runs, with the transfers
between them.
"""
