"""Calls of actors on meshes, and the sums of their gradients, as a step records them.

In: a call on a mesh. Out: ops that bring arguments into their layouts and add up gradients.
"""
