"""Checkpoints: the tensors of actors in files that do not depend on the ranks that hold them.

In: actors, each with its tensors or its pieces of them. Out: one file of logical tensors, and back.
"""
