"""Copies of tensors between the memory of a device and that of its host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..attributes import HOST_STREAMS, Stream
from ..phases import Phase
from ..types import MemorySpace, is_on_host
from .base import Op
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
    its slot is freed. The copy has the strides of the tensor, and so has what comes back.
    """

    opcode: ClassVar[str] = "copy_start"
    takes: ClassVar[str] = "a tensor"
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
    def home_stream(self) -> Stream:
        """The stream of its direction."""
        return Stream.OFFLOAD if self.is_to_host else Stream.FETCH

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 1, "one tensor")
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
        if is_back and self.slot is not None:
            raise Problem("a copy from the host has a slot", "only a copy to the host fills one")
