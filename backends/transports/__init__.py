"""Communicators by name, those of third parties among them.

In: a name. Out: what makes a communicator.
"""
