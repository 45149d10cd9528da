"""Compare values that all ranks must hold in common, by digests.

In: values of this rank. Out: the values of all ranks, or the ranks that differ.
"""
