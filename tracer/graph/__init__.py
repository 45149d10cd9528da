"""Cut graphs, lay them out on meshes, and make code of them.

In: a `Joint`. Out: bodies that ranks run.
"""
