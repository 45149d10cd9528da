"""Programs that every communicator must run, and their results in the virtual world.

A case is a scheduled module of some ranks and the values of its parameters. A communicator conforms
if each rank's program returns what it returns in the virtual world, in each of several executions.
The cases know nothing of how they are run: in threads, by mpirun, on devices or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import torch

from cg.backends.base import Pause
from cg.backends.dtypes import TORCH_DTYPES
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.ops import Op, Recv, Send
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.types import DType, TensorType
from cg.ir.verify.verifier import verify
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.lower.assign_streams import AssignStreams
from cg.passes.lower.batch_messages import BatchMessages
from cg.passes.lower.overlap import Overlap
from cg.passes.lower.plan_buffers import PlanBuffers
from cg.passes.manager.manager import PassManager

EXECUTIONS = 3


def patient(pause: Pause, seconds: float) -> Pause:
    """A pause that raises `TimeoutError` so many seconds from now."""
    deadline = monotonic() + seconds

    def wait(polls: int) -> None:
        pause(polls)
        if monotonic() > deadline:
            raise TimeoutError(f"an execution has not ended after {seconds:g} s")

    return wait


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: in test ids.
        text: the module before streams and buffers are planned.
        reduces: the element type that it reduces, if it does.
        objects: whether it sends objects.
    """

    name: str
    text: str
    reduces: DType | None = None
    objects: bool = False
    planned: bool = field(default=True)

    def module(
        self, via: str | None = None, rendezvous: str = "", *, in_one_order: bool = False
    ) -> Module:
        """The module as it is run.

        Args:
            via: the transport of its channels.
            rendezvous: that transport, if it does a rank's messages one after the other.
            in_one_order: whether ranks post their messages in one order, as on devices.
        """
        module = parse_module(self.text)
        for id_, channel in module.channels.items():
            module.channels[id_] = replace(channel, via=via)
        if in_one_order:
            put_in_one_order(module)
        verify(module)
        if self.planned:
            streams = BatchMessages(rendezvous), AssignStreams(rendezvous)
            PassManager((Overlap(), *streams, PlanBuffers(), CheckDeadlock())).run(module)
        return module

    @property
    def ranks(self) -> int:
        """How many ranks it needs."""
        return parse_module(self.text).world

    def inputs(self, execution: int) -> list[list[Any]]:
        """For each rank the values of its parameters in an execution; always the same."""
        generator = torch.Generator().manual_seed(hash_of(self.name) + execution)
        module = parse_module(self.text)
        return [
            [value_of(p.type, generator) for p in program.params] for program in module.programs
        ]

    def expected(self) -> list[list[tuple[Any, ...]]]:
        """For each execution the outputs by rank, from the virtual world."""
        executable = VirtualExecutable(self.module(), {}, {}, poison=True)
        return [executable.run(self.inputs(i)) for i in range(EXECUTIONS)]


def put_in_one_order(module: Module) -> None:
    """Post receives by number and channel among the sends of their ranks, no earlier.

    A host may wait for its device at any op. Ranks that all receive before they send then wait for
    each other.
    """
    for program in module.programs:
        ops: list[Op] = []
        held: list[Recv] = []
        for op in program.ops:
            if isinstance(op, Recv):
                held.append(op)
                continue
            awaited = [recv for recv in held if recv.result in op.operands]
            last = max(map(_turn, [op, *awaited] if isinstance(op, Send) else awaited), default=())
            due = sorted((recv for recv in held if _turn(recv) <= last), key=_turn)
            held = [recv for recv in held if recv not in due]
            ops += [*due, op]
        program.ops[:] = ops


def _turn(op: Send | Recv) -> tuple[int, ...]:
    assert op.seq is not None, "messages are numbered"
    assert op.chan is not None, "they have channels"
    return op.seq, op.chan


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 100003


def value_of(type_: Any, generator: torch.Generator) -> Any:
    """A value whose sums and products over some ranks are exact in its type."""
    if not isinstance(type_, TensorType):
        return {"n": int(torch.randint(100, (), generator=generator)), "text": "x" * 100}
    dtype = TORCH_DTYPES[type_.dtype]
    if type_.dtype is DType.BOOL:
        return torch.randint(0, 2, type_.shape, generator=generator).bool()
    values = torch.randint(0, 4, type_.shape, generator=generator)
    return values.to(dtype)


def check(actual: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    """The outputs of one rank are what they should be, to the bit."""
    assert len(actual) == len(expected), what
    for index, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(right, torch.Tensor):
            assert mine == right, f"{what}: output {index}"
            continue
        mine = mine.cpu()
        assert mine.dtype is right.dtype, f"{what}: output {index} is {mine.dtype}"
        assert mine.shape == right.shape, f"{what}: output {index} is {mine.shape}"
        same = torch.equal(_bytes(mine), _bytes(right))
        assert same or right.numel() == 0, f"{what}: output {index} is {mine}, not {right}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
