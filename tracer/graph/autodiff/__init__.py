"""Cut joint graphs into forward and backward, and backwards into halves.

In: a joint graph. Out: the graphs of its pieces, with the values that are saved between them.
"""
