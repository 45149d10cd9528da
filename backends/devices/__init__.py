"""Accelerators: the work of a rank's program on one, and the kinds that torch drives.

In: a program with its communicators (`programs/` binds and runs it). Out: work on the device's
streams. Libraries for messages between devices are in `../nccl` and `../hccl`.
"""
