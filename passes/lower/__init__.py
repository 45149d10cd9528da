"""Passes over scheduled programs: streams, overlap, batches, buffers and device graphs.

In: linear programs. Out: the same programs, with all that a rank needs to run them.
"""
