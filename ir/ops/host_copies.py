"""Copies of tensors between the memory of a device and that of its host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..attributes import HOST_STREAMS, Stream
from ..phases import Phase
from ..types import MemorySpace, is_on_host
from .base import Op, Value
from .rules import (
    CheckContext,
    Problem,
    bare,
    expect_future,
    expect_operands,
    expect_results,
    expect_tensor,
    same_but_place,
)


@dataclass(eq=False, slots=True)
class CopyStart(Op):
    """Start to copy a tensor from the device's memory to the host's, or back.

    The host's memory belongs to the plan: `slot` names the buffer of the rank that a copy to the
    host fills, once `plan-buffers` has chosen it. A copy to the host waits until the last copy in
    its slot is freed. The copy has the strides of the tensor, and so has what comes back. With a
    second operand, a copy to the host fills that instead, and has no slot: memory of an actor's
    state, which a function of kind HOST hands over. The host waits for such a copy.
    """

    opcode: ClassVar[str] = "copy_start"
    takes: ClassVar[str] = "a tensor, and for a copy to the host possibly the memory to fill"
    gives: ClassVar[str] = "a future of the same type in the other memory"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.SCHEDULED})
    remedy: ClassVar[str] = "offload makes it, in scheduled programs"
    streams: ClassVar[frozenset[Stream]] = HOST_STREAMS
    slot: int | None = field(default=None, kw_only=True)

    @property
    def is_to_host(self) -> bool:
        """True for a copy to the host, and False for one back."""
        return is_on_host(self.result.type)

    @property
    def memory(self) -> Value | None:
        """The memory of the host that it fills, where that is not the plan's."""
        return self.operands[1] if len(self.operands) > 1 else None

    @property
    def shared_operand(self) -> Value | None:
        """The memory that it fills, if it is given any."""
        return self.memory

    @property
    def home_stream(self) -> Stream:
        """The stream of its direction."""
        return Stream.OFFLOAD if self.is_to_host else Stream.FETCH

    def check(self, context: CheckContext) -> None:
        if self.memory is None:
            expect_operands(self, 1, "one tensor")
        else:
            expect_operands(self, 2, "a tensor, and the memory to fill")
        expect_results(self, 1, "one result, a future")
        source = expect_tensor(self.operands[0], self)
        is_back = source.space is MemorySpace.HOST
        other = MemorySpace.DEVICE if is_back else MemorySpace.HOST
        expected, promised = replace(source, space=other), expect_future(self.result, self)
        if not same_but_place(promised, expected):
            raise Problem(
                f"%{self.result.name} is future<{bare(promised)}>, but a copy of {bare(source)} to "
                f"the other memory promises {bare(expected)}",
                "only the memory changes",
                self.result,
            )
        if self.stream is not None and self.stream is not self.home_stream:
            raise Problem(
                f"a copy {'from' if is_back else 'to'} the host is on stream {self.stream.value}",
                f"each direction has its own stream, this one {self.home_stream.value}",
            )
        if self.memory is not None and expect_tensor(self.memory, self) != promised:
            raise Problem(
                f"a copy to %{self.memory.name} gives {bare(promised)}",
                "it fills memory of the host of its own type",
                self.memory,
            )
        if self.slot is not None and (is_back or self.memory is not None):
            raise Problem(
                f"a copy {'from' if is_back else 'into given memory of'} the host has a slot",
                "only a copy to the host fills one, where it is given no memory",
            )
