"""Which iterations of loops over classes a run has, and what they do.

Plain Python runs those iterations alone whose class occurs, and a trace runs all. So nothing behind
a loop may depend on which have run, by a variable, a list, an object or a tensor. Nobody can list
all these ways. So a method runs again, with one iteration of each loop, and is compared: in
operators and results outside of loops, and in what this iteration computes of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ....ir.location import Location

SINGLE = (1, 2)
"""The iterations that run alone; of a loop with fewer, they are counted anew from its first."""


class RunLog(Protocol):
    """The operators of a run."""

    def off(self) -> AbstractContextManager[None]:
        """Note no operators inside the `with` block."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Let a tensor stand in entries by a name."""

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name that a tensor was given; None if it has none."""


@dataclass(eq=False)
class Iterations:
    """The iterations of a run.

    Attributes:
        log: the operators of the run, which gets none of those inside of loops; None: there is no
            such log.
        only: the one iteration of each loop that runs; None: all run.
        loops: how many loops there were.
        computed: what iterations compute of their rows, by the number of the loop and of the class.
    """

    log: RunLog | None = None
    only: int | None = None
    loops: int = 0
    computed: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    @contextmanager
    def of_loop(self, classes: int) -> Iterator[Sequence[int]]:
        """The numbers of the classes whose iterations run; the `with` block is the loop."""
        self.loops += 1
        numbers = range(classes) if self.only is None or not classes else [self.only % classes]
        if self.log is None:
            yield numbers
            return
        with self.log.off():
            yield numbers

    def note(self, number: int, value: Any) -> None:
        """Note what the iteration of a class computes, in the loop that runs."""
        self.computed.setdefault((self.loops, number), []).append(value)

    def name(self, result: Any, function: str, args: Sequence[Any]) -> Any:
        """Name a tensor that an iteration makes by how it does so; it may be seen behind the loop.

        Returns:
            The result.
        """
        if self.log is not None and isinstance(result, torch.Tensor):
            words = [self.words(a) if isinstance(a, torch.Tensor) else repr(a) for a in args]
            self.log.name(result, f"{function}({', '.join(words)})")
        return result

    def words(self, tensor: torch.Tensor) -> str:
        """A tensor in words that do not depend on what has run before."""
        name = None if self.log is None else self.log.name_of(tensor)
        return name or f"{tensor.dtype}{list(tensor.shape)}"

    def difference(self, alone: Iterations) -> tuple[str, Location | None] | None:
        """How iterations of a run with single ones differ from these, with no line; None if not."""
        for key, value in alone.computed.items():
            if self.computed.get(key) != value:
                return "an iteration does not compute the same when it is the first", None
        return None
