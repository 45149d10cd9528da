"""Give each value of a graph a layout, and cut the graph where ranks exchange something.

In: a graph and the layouts of what it takes. Out: the parts that each rank runs, with transfers
between them.
"""
