"""The error of a failed call of NCCL, the same for each binding."""

from __future__ import annotations

from ..streams.library import CommunicationError


def failed(what: str, error: Exception) -> CommunicationError:
    """Make the run time's error from the binding's.

    Args:
        what: the call, in words.
    """
    return CommunicationError(f"NCCL's {what} has failed: {error}; NCCL_DEBUG=INFO says more")
