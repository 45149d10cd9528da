"""What all ranks must hold in common, as digests that they compare.

In: values of this rank. Out: those of all ranks, or the ranks that differ.
"""
