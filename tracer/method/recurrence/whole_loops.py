"""Torch's functions that loop over time, with one operator for each loop.

Torch's own loops run where these operators do not follow: for packed sequences, for targets of CTC
that are not padded, with lengths in tensors, for arguments that torch refuses, and, but for CTC,
under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from ...torch_modes import is_autocast_on
from .alignments import accepts_ctc, ctc_loss
from .loop_operators import recurrence
from .recurrent_cells import CELLS


def _layers(
    cell: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The results of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`."""
    directions = 2 if bidirectional else 1
    firsts = [state.unbind(0) for state in _states(hx)]
    count = len(params) // (num_layers * directions)
    value = input.transpose(0, 1) if batch_first else input
    lasts: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        hidden = []
        for direction in range(directions):
            index = layer * directions + direction
            own = params[index * count : (index + 1) * count]
            states = [state[index] for state in firsts]
            after, last = _direction(cell, value, states, own, has_biases, direction == 1)
            hidden.append(after)
            lasts.append(last)
        value = torch.cat(hidden, -1) if bidirectional else hidden[0]
        if dropout and train and layer < num_layers - 1:
            value = torch.dropout(value, dropout, train)
    result = value.transpose(0, 1) if batch_first else value
    return (result, *map(torch.stack, zip(*lasts, strict=True)))


def _direction(
    cell: str,
    value: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction."""
    of_input, of_hidden, *others = params
    biases = others[:2] if has_biases else (None, None)
    projections = others[2 if has_biases else 0 :]
    projection = projections[0] if projections else None
    gates = linear(value, of_input, biases[0])
    return recurrence(cell, gates, states, of_hidden, biases[1], projection, reverse)


def _accepts_layers(
    cell: str,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: Any,
    bidirectional: Any,
    **others: Any,
) -> bool:
    if not isinstance(params, (list, tuple)):
        return False  # a packed sequence, whose second argument is the numbers of rows
    states = _states(hx)
    if not _are_plain(input, *states, *params) or len(states) != CELLS[cell].states:
        return False
    shapes = [state.shape for state in states]
    is_projected = cell == "lstm" and shapes[0][2:] != shapes[1][2:]
    count = num_layers * (2 if bidirectional else 1)
    return (
        [tensor.dim() for tensor in (input, *states)] == [3] * (1 + len(states))
        and len(params) == count * ((4 if has_biases else 2) + is_projected)
        and all(shape[0] == count for shape in shapes)
        and 0 not in input.shape[:2]
    )


def _one_step(
    cell: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The results of `torch.lstm_cell`, `torch.gru_cell` and the cells of `nn.RNNCell`."""
    gates = linear(input, w_ih, b_ih).unsqueeze(0)
    _, last = recurrence(cell, gates, _states(hx), w_hh, b_hh)
    return last[0] if len(last) == 1 else last


def _accepts_step(
    cell: str, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
) -> bool:
    tensors = (input, *_states(hx))
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    return (
        _are_plain(*tensors, w_ih, w_hh, *biases)
        and len(tensors) == 1 + CELLS[cell].states
        and all(tensor.dim() == 2 for tensor in tensors)
    )


def _states(hx: Any) -> tuple[Any, ...]:
    return tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)


def _are_plain(*tensors: Any) -> bool:
    """True for dense tensors of one floating type, which stays as it is."""
    return not is_autocast_on() and all(
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.dtype is tensors[0].dtype
        and tensor.device == tensors[0].device
        for tensor in tensors
    )


_C: Any = torch._C._VariableFunctions
WHOLE_LOOPS: Mapping[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    **{
        getattr(_C, cell): (partial(_layers, cell), partial(_accepts_layers, cell))
        for cell in CELLS
    },
    **{
        getattr(_C, f"{cell}_cell"): (partial(_one_step, cell), partial(_accepts_step, cell))
        for cell in CELLS
    },
    _C.ctc_loss: (ctc_loss, accepts_ctc),
    functional.ctc_loss: (ctc_loss, accepts_ctc),
}
"""By torch's functions, as `nn.LSTM`, `nn.LSTMCell` and `nn.CTCLoss` call them: what computes the
same by one operator, and whether it takes a call's arguments."""
