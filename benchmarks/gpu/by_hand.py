"""Work written by hand: calls of NCCL and torch on three streams, captured into one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import cg
from cg.backends.nccl.communicator import make_pool
from cg.ir.attributes import Stream
from cg.ir.ops.module import Channel
from cg.launch.world import world as worlds

BOTH_WAYS = (Channel(0, (0, 1)), Channel(1, (1, 0)))


class Hand:
    """Work written by hand: a pool of NCCL, three streams, one graph.

    Args:
        channels: whose communicators it needs; by default one each way between two ranks.
    """

    def __init__(self, channels: Sequence[Channel] = BOTH_WAYS) -> None:
        world: Any = worlds.world()
        self.pool = make_pool(world)
        self.lines = self.pool.join(channels).lines
        self.device = world.device
        kinds = (Stream.COMPUTE, Stream.SEND, Stream.RECV)
        self.streams = {kind: self.device.stream(kind) for kind in kinds}
        self.rank = world.rank
        self.graph: Any = None

    def send(self, channel: int, tensor: torch.Tensor, stream: Any) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        raw = stream.cuda_stream
        self.pool.library.send(tensor.data_ptr(), nbytes, 1, self.lines[channel].comm, raw)

    def recv(self, channel: int, tensor: torch.Tensor, stream: Any) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        raw = stream.cuda_stream
        self.pool.library.recv(tensor.data_ptr(), nbytes, 0, self.lines[channel].comm, raw)

    def capture(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.streams[Stream.COMPUTE]):
            work()
            torch.cuda.synchronize()
            cg.barrier()
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(capture_error_mode="thread_local")
            work()
            self.graph.capture_end()

    def replay(self) -> None:
        self.graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.graph = None
        self.pool.close()


class HandRoundTrip(Hand):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.x = torch.ones(numel, device="cuda")
        self.y = torch.ones(numel, device="cuda")
        self.capture(self.work)

    def work(self) -> None:
        stream = torch.cuda.current_stream()
        if self.rank == 0:
            self.send(0, self.x, stream)
            self.recv(1, self.y, stream)
        elif self.rank == 1:
            self.recv(0, self.x, stream)
            self.send(1, self.x, stream)
