"""Cut joint graphs into forward and backward, and backwards into halves.

In: a joint graph. Out: graphs of the parts, with the values saved between them.
"""
