"""The Python objects that a function or an actor reaches, and what has changed of them.

In: a function, an object or containers. Out: the objects that can change, with their paths;
snapshots of these; and the changes since, which can be undone, made again and watched.
"""
