"""Passes over scheduled programs: streams, overlap, batches, buffers, parts that devices record.

In: linear programs. Out: the same programs, with all that a rank needs in order to run them.
"""
