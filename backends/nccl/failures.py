"""What is said of a call of NCCL that has failed, whichever binding made it."""

from __future__ import annotations

from ..streams.library import CommunicationError


def failed(what: str, error: Exception) -> CommunicationError:
    """The error for the run time, of the binding's own.

    Args:
        what: the call, in words.
    """
    return CommunicationError(f"NCCL's {what} has failed: {error}; NCCL_DEBUG=INFO says more")
