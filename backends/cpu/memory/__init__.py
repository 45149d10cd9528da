"""Memory between the processes of one machine: segments, fences, and values as bytes.

In: values and shared memory. Out: bytes that another process may read.
"""
