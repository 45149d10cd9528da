"""Measure what messages between two ranks cost, by sending some back and forth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import sleep

import torch
from torch import Tensor

from ...backends.base import Body, World
from ...backends.program.linked import LinkedModule
from ...ir.attributes import Symbol
from ...ir.ops import Call, Op, Return, Value
from ...ir.ops.module import Function, Module, Program
from ...ir.phases import Phase
from ...ir.pipeline.costs import Link
from ...ir.types import DType, Place, TensorType, relocate
from ...passes.manager.manager import PassManager
from ...passes.manager.pipelines import default_pipeline
from ..world.devices import fabrics_of, torch_device
from .recording import record

_MESSAGES = 12
"""The number of messages of one size that go over an edge, back and forth."""
_PAUSE = 1e-3
"""Seconds between a message and its answer. By then the receiver sleeps, as it does in a step where
it waits, so the latency includes its waking up."""
SIDE = 2048
"""Rows of the matrix that a device squares instead of the pause, which takes about as long."""
_SMALL = 64
_LARGE = 1 << 18
"""Bytes of small and of large messages, unless the step has larger ones. The difference of their
times gives the bandwidth."""


def try_edge(
    world: World,
    edge: tuple[int, int],
    largest: int,
    overhead: float,
) -> Link:
    """Measure latency and bandwidth between two ranks; collective, though others send nothing.

    Args:
        world: all ranks.
        edge: the two ranks.
        largest: bytes of the largest message that will matter.
        overhead: milliseconds to leave out, which a sender spends before a message leaves.
    """
    large = max(largest, _LARGE)
    time = _one_way(world, edge, _SMALL)
    longer = _one_way(world, edge, large) - time
    # GB/s are 1e6 bytes a millisecond.
    bandwidth = (large - _SMALL) / longer / 1e6 if longer > 0 else math.inf
    return Link(max(0.0, time - overhead), bandwidth)


def _one_way(world: World, edge: tuple[int, int], nbytes: int) -> float:
    """Milliseconds from the end of a call to the start of the call that gets its tensor.

    Clocks of ranks need not agree: a round trip is the time between two calls of one rank, less the
    duration of the call on the other rank in between. Half of it is one way.
    """
    module = _ping_pong(world, edge, nbytes)
    device = torch_device(world)
    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
    think = partial(sleep, _PAUSE) if device is None else _product(device)
    bodies: dict[str, Body] = {name: _answer(message, think) for name in module.functions}
    program = module.program_of(edge[0])
    asks = [op for op in program.ops if isinstance(op, Call)]
    ways: list[float] = []
    for recording in record(world, LinkedModule(module, bodies, {}), [], list, 2)[1:]:
        spans = {span.op: span for span in recording.spans}
        answers = [span for span in recording.spans if span.rank == edge[1]]
        for (call, following), answer in zip(pairwise(asks), answers, strict=True):
            both = spans[following].start - spans[call].end - (answer.end - answer.start)
            ways.append(max(0.0, both / 2))
    return median(ways)


def _answer(message: Tensor, think: Callable[[], object]) -> Body:
    """A body that takes any tensors, calls `think`, and returns `message`."""

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        think()
        return (message,)

    return run


def _product(device: torch.device) -> Callable[[], object]:
    """A product that keeps a device busy until its host has put the next message on a stream."""
    matrix = torch.zeros(SIDE, SIDE, device=device)
    return partial(torch.mm, matrix, matrix)


def _ping_pong(world: World, edge: tuple[int, int], nbytes: int) -> Module:
    """A compiled module in which a tensor goes back and forth between two ranks."""
    module = Module("edge", Phase.TRACED, world.size)
    type_ = TensorType(DType.U8, (nbytes,))
    ops: list[Op] = []
    ball: tuple[Value, ...] = ()
    for turn in range(_MESSAGES + 1):
        rank = edge[turn % 2]
        name = f"player{rank}.{'answer' if turn else 'serve'}"
        module.functions[name] = Function(
            name, (type_,) if turn else (), (type_,), actor=f"player{rank}"
        )
        value = Value(f"ball.{turn}", relocate(type_, Place.of(rank)))
        ops.append(Call(ball, (value,), fn=Symbol(name)))
        ball = (value,)
    ops.append(Return(ball, at=Place.of(edge[_MESSAGES % 2])))
    module.programs = [Program("edge", [], ops)]
    PassManager(default_pipeline(fabrics=fabrics_of(world))).run(module)
    return module
