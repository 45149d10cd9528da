"""Report device graphs that fall back to op by op."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...ir.ops.module import Module


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a part of a program is not replayed.

    Attributes:
        reason: in words.
        remedy: what the user can do about it, in sentences.
    """

    reason: str
    remedy: str


class Fallbacks:
    """The graphs of a rank's program that are put on the device op by op, and why.

    Each graph is reported once, however many executions of the program may be in flight.

    Args:
        module: the scheduled module.
        rank: the rank of the program.
        write: writes a line to the dump, if there is one.

    Attributes:
        reasons: the reason for each graph, by the graph's number.
    """

    def __init__(
        self, module: Module, rank: int, write: Callable[[str], None] | None = None
    ) -> None:
        self.reasons: dict[int, str] = {}
        self._module = module
        self._rank = rank
        self._write = write

    def warn(self, graph: int, refusal: Refusal) -> None:
        """Warn that a graph cannot be captured, and write it down."""
        if graph in self.reasons:
            return
        self.note(graph, refusal.reason)
        warnings.warn(
            f"rank {self._rank} puts graph {graph} of '{self._module.name}' "
            f"({self._extent(graph)}) on its device op by op and does not replay it: "
            f"{refusal.reason}. Values are the same, but the host takes longer. {refusal.remedy}",
            RuntimeWarning,
            stacklevel=2,
        )

    def note(self, graph: int, reason: str) -> None:
        """Write down that a graph is better not captured."""
        if graph in self.reasons:
            return
        self.reasons[graph] = reason
        if self._write is not None:
            with suppress(OSError):  # a step does not fail because of a file
                self._write(f"rank {self._rank}: graph {graph} is put on op by op: {reason}\n")

    def _extent(self, graph: int) -> str:
        """The ops of a graph, and the line that the first of them comes from."""
        program = self._module.program_of(self._rank)
        at = [index for index, op in enumerate(program.ops) if op.graph == graph]
        first = program.ops[at[0]]
        where = "" if first.loc is None else f", from {first.loc}"
        return f"ops {at[0]} to {at[-1]} of {len(program.ops)}{where}"
