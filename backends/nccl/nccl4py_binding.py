"""NCCL by nccl4py's low-level bindings, NVIDIA's own."""

from __future__ import annotations

from typing import Any

import nccl.bindings.nccl as low

from ..streams.library import CommunicationError
from .codes import IN_PROGRESS, SUCCESS
from .library import Nccl


class Nccl4py(Nccl):
    """NCCL by nccl4py.

    Args:
        nonblocking: True to join communicators, and make all their calls, without blocking the
            host. Such a communicator can be aborted at any time. But NCCL starts a thread for each
            call, and this class waits for it, since the next call may only be made when the last is
            done. The wait asks the host's side of NCCL alone, and so is allowed in a capture.
    """

    name = "NCCL (nccl4py)"

    def __init__(self, nonblocking: bool) -> None:
        super().__init__(low, low.NCCLError, nonblocking)

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""
        return bytes(self._checked("making of a key", low.get_unique_id))

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """Begin to join a new communicator; all its members do."""
        config = low.Config()
        config.blocking = int(not self._nonblocking)
        if width is not None:
            config.min_ctas, config.max_ctas = 1, width
        key = low.UniqueId.from_buffer(unique)
        description = f"joining of {size} ranks, as member {rank},"
        return self._checked(description, low.comm_init_rank_config, size, key, rank, config)

    def is_ready(self, comm: Any) -> bool:
        """True once a communicator has been joined, and its last call is done."""
        state = int(self._checked("look for errors", low.comm_get_async_error, comm))
        if state not in (SUCCESS, IN_PROGRESS):
            message = f"{low.get_error_string(state)} {low.get_last_error(comm)}"
            raise CommunicationError(message.strip())
        return state == SUCCESS


def make(nonblocking: bool) -> Nccl4py:
    """The library."""
    return Nccl4py(nonblocking)
