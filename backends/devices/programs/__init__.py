"""Bind and run a rank's program on its device.

In: a program with its bodies and communicators. Out: work on the device's streams, some of it
recorded once and replayed.
"""
