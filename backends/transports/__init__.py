"""Communicators by name, also of third parties.

In: a name. Out: what makes a communicator.
"""
