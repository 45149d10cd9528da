"""The data of a captured graph: the memory that it works on, and what outlives a replay of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...device import DeviceGraph
from ..output_buffers import LentTensor
from ..ports import StreamPort


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph, and the memory that it works on.

    Attributes:
        takes: for each register that it reads from outside, the memory that it reads.
        gives: for each register that others read behind it, the value that it leaves there.
        loans: for each register whose value is lent to the caller, its `LentTensor`.
        state: the tensors that were parameters and gradients when it was captured; they live on.
        gradients: `.grad` of each trained parameter behind it.
    """

    graph: DeviceGraph
    takes: tuple[tuple[int, Tensor], ...]
    gives: tuple[tuple[int, Tensor], ...]
    loans: tuple[tuple[int, LentTensor], ...]
    state: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    def is_free(self) -> bool:
        """True if the caller holds none of its last outputs."""
        return all(loan.is_back() for _, loan in self.loans)


@dataclass(frozen=True, slots=True)
class Outlasting:
    """Memory outside of the pool, for values of a graph that others use behind it.

    Attributes:
        landings: for messages whose values are outputs of the graph.
        copies: for values in registers, which the graph copies there at its end.
        gradients: for the gradients of parameters; one that a body has made elsewhere is copied
            there. Gradients that stay in the pool are left out.
    """

    landings: tuple[tuple[StreamPort, Tensor], ...]
    copies: tuple[tuple[int, Tensor], ...] = ()
    gradients: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Interface:
    """The registers that a segment and the rest of the program have in common.

    Attributes:
        reads: registers that it reads and has not written.
        inputs: those of `reads` that hold inputs of the program.
        gives: registers that it writes and others read.
        copied: those of `gives` that may leave the program's control, to methods or the caller, by
            themselves or as another value that shares their memory.
        lent: those of `copied` that nothing else in the program reads.
    """

    reads: tuple[int, ...]
    inputs: tuple[int, ...]
    gives: tuple[int, ...]
    copied: frozenset[int]
    lent: frozenset[int]
