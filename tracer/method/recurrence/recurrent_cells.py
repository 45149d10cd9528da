"""The cells of recurrent layers: one time step, and the gradient of one.

A step does what torch's own loop does, operator by operator, so that on a host the results are the
same bit for bit. On CUDA devices it calls the fused kernels of torch's loop.

Sources: Hochreiter and Schmidhuber, Long Short-Term Memory, 1997; Cho et al., Learning Phrase
Representations using RNN Encoder-Decoder, arXiv 1406.1078; Sak et al., Long Short-Term Memory
Recurrent Neural Network Architectures, arXiv 1402.1128, for projections; the documentation of
`torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_ATEN: Any = torch.ops.aten
_of_sigmoid = _ATEN.sigmoid_backward.default
_of_tanh = _ATEN.tanh_backward.default
_of_relu = _ATEN.threshold_backward.default


@dataclass(frozen=True)
class CellWeights:
    """The weights of a cell that each step uses. A gate has `H` rows.

    Attributes:
        hidden: the weight of the hidden state, `[gates * H, P]`.
        bias: its bias, `[gates * H]`; None if there is none.
        projection: the weight `[P, H]` that makes the hidden state smaller, in an LSTM; None if
            there is none, and `P` is `H`.
    """

    hidden: Tensor
    bias: Tensor | None
    projection: Tensor | None


@dataclass(frozen=True)
class CellGradients:
    """The gradients of one step.

    Attributes:
        gates: those of the input's share of the gates, and, if it differs, of the hidden state's.
        hidden: terms of the gradient of the hidden state before the step, in the order in which
            autograd adds them.
        others: the gradients of the other states before the step.
    """

    gates: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    others: tuple[Tensor, ...] = ()


class Cell(ABC):
    """A kind of cell.

    Attributes:
        gates: the number of gates.
        states: the number of states: the hidden state, and the memory of an LSTM.
        terms: how many gradients of gates a step has, and how many terms that of the hidden state.
    """

    gates: int
    states = 1
    terms = 1

    @abstractmethod
    def step(
        self, gates: Tensor, states: Sequence[Tensor], weights: CellWeights
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """One step.

        Args:
            gates: the input's share of the gates, `[B, gates * H]`.
            states: the states before, `[B, P]`, and `[B, H]` for a memory.
            weights: the weights.

        Returns:
            The states after it, and what its gradient takes besides them.
        """

    @abstractmethod
    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Tensor,
        weights: CellWeights,
    ) -> CellGradients:
        """The gradients of one step.

        Args:
            gradients: those of the states after it, the hidden state without its projection.
            kept: what `step` has returned for this.
            before: the states before it.
            after: the hidden state after it.
            weights: the weights.
        """

    def widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        """The widths of what a step returns for its gradient, for gates of `size` rows."""
        return ()


class _Lstm(Cell):
    gates = 4
    states = 2

    def step(
        self, gates: Tensor, states: Sequence[Tensor], weights: CellWeights
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        hidden, memory = states
        share = linear(hidden, weights.hidden, weights.bias)
        if _has_kernels(gates.device) and not torch.is_grad_enabled():
            hidden, memory, activated = _ATEN._thnn_fused_lstm_cell(gates, share, memory)
        else:
            activated = share.add_(gates)
            into, keep, new, out = activated.unsafe_chunk(4, 1)
            into.sigmoid_(), keep.sigmoid_(), new.tanh_(), out.sigmoid_()
            memory = (keep * memory).add_(into * new)
            hidden = out * memory.tanh()
        if weights.projection is not None:
            hidden = hidden.matmul(weights.projection.t())
        return (hidden, memory), (activated, memory)

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Tensor,
        weights: CellWeights,
    ) -> CellGradients:
        hidden, memory = gradients
        activated, memory_after = kept
        if _has_kernels(activated.device):
            gates, previous, _ = _ATEN._thnn_fused_lstm_cell_backward_impl(
                hidden, memory, before[1], memory_after, activated, False
            )
            return CellGradients((gates,), (gates.mm(weights.hidden),), (previous,))
        into, keep, new, out = activated.chunk(4, 1)
        of_out = torch.zeros_like(memory_after)
        if hidden is not None:
            squashed = memory_after.tanh()
            of_out = _of_sigmoid(hidden * squashed, out)
            through = _of_tanh(hidden * out, squashed)
            memory = through if memory is None else memory + through
        assert memory is not None, "a step without a gradient has none to give"
        gates = torch.cat(
            (
                _of_sigmoid(memory * new, into),
                _of_sigmoid(memory * before[1], keep),
                _of_tanh(memory * into, new),
                of_out,
            ),
            1,
        )
        return CellGradients((gates,), (gates.mm(weights.hidden),), (memory * keep,))

    def widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        return (4 * size, size)


class _Gru(Cell):
    gates = 3
    terms = 2

    def step(
        self, gates: Tensor, states: Sequence[Tensor], weights: CellWeights
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        (hidden,) = states
        share = linear(hidden, weights.hidden, weights.bias)
        if _has_kernels(gates.device) and not torch.is_grad_enabled():
            hidden, workspace = _ATEN._thnn_fused_gru_cell(gates, share, hidden)
            return (hidden,), (workspace,)
        of_input = gates.unsafe_chunk(3, 1)
        reset, update, candidate = share.unsafe_chunk(3, 1)
        reset.add_(of_input[0]).sigmoid_(), update.add_(of_input[1]).sigmoid_()
        new = of_input[2].add(candidate.mul(reset)).tanh_()
        return ((hidden - new).mul_(update).add_(new),), (share, new)

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Tensor,
        weights: CellWeights,
    ) -> CellGradients:
        (gradient,) = gradients
        assert gradient is not None, "a step without a gradient has none to give"
        if _has_kernels(gradient.device):
            gates, share, direct, *_ = _ATEN._thnn_fused_gru_cell_backward(gradient, kept[0], False)
            return CellGradients((gates, share), (direct, share.mm(weights.hidden)))
        activated, new = kept
        reset, update, candidate = activated.chunk(3, 1)
        direct = gradient * update
        of_new = _of_tanh(gradient - direct, new)
        of_reset = _of_sigmoid(of_new * candidate, reset)
        of_update = _of_sigmoid(gradient * (before[0] - new), update)
        gates = torch.cat((of_reset, of_update, of_new), 1)
        share = torch.cat((of_reset, of_update, of_new * reset), 1)
        return CellGradients((gates, share), (direct, share.mm(weights.hidden)))

    def widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        return (5 * size,) if _has_kernels(device) else (3 * size, size)


class _Plain(Cell):
    """The cell of `nn.RNN`."""

    gates = 1

    def __init__(self, is_tanh: bool) -> None:
        self._is_tanh = is_tanh

    def step(
        self, gates: Tensor, states: Sequence[Tensor], weights: CellWeights
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        share = linear(states[0], weights.hidden, weights.bias).add_(gates)
        return (share.tanh() if self._is_tanh else share.relu(),), ()

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Tensor,
        weights: CellWeights,
    ) -> CellGradients:
        (gradient,) = gradients
        assert gradient is not None, "a step without a gradient has none to give"
        if self._is_tanh:
            gates = _of_tanh(gradient, after)
        else:
            gates = _of_relu(gradient, after, 0)
        return CellGradients((gates,), (gates.mm(weights.hidden),))


CELLS: Mapping[str, Cell] = {
    "lstm": _Lstm(),
    "gru": _Gru(),
    "rnn_tanh": _Plain(is_tanh=True),
    "rnn_relu": _Plain(is_tanh=False),
}
"""The cells, by the names of torch's functions of layers."""


def _has_kernels(device: torch.device) -> bool:
    """True if torch has fused kernels for one step on a device."""
    return device.type == "cuda"
