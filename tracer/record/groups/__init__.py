"""Record calls of actors on meshes, and the reductions of their gradients.

In: a call on a mesh. Out: ops that bring arguments into their layouts and reduce gradients.
"""
