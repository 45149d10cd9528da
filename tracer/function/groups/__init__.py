"""Sharding plans, and the pieces of the state of an actor on a mesh.

In: a mesh, a plan, and an actor's tensors. Out: layouts, and tensors that hold one rank's pieces.
"""

from . import plans

__all__ = ["plans"]
