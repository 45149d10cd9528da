"""Accelerators: what a rank's program needs of one, and those that torch drives.

In: a program with its communicators (`programs/` binds and runs it). Out: work on the device's
streams. Libraries for messages between devices are in `../nccl` and `../hccl`.
"""
