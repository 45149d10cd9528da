"""The Python objects that a function or an actor reaches, and what has changed of them.

In: a function, an object or containers. Out: what of them can change, each with its path; snapshots
of that; and the changes since, each of which can be made, taken back and watched.
"""
