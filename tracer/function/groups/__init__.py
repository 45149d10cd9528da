"""Sharding plans: how the tensors of an actor on a mesh are laid out, and the pieces of its state.

In: a mesh, a plan, and an actor's tensors. Out: layouts, and tensors that hold one rank's pieces.
"""

from . import plans

__all__ = ["plans"]
