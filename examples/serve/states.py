"""States of sequences: what layers keep of a sequence in one size, however long it is.

Such are the states of linear attention, of state spaces and of short convolutions. Each running
sequence has a slot, by its number, in a pool for each such state. The layers of a cache that
transformers has for them are filled from the slots of a batch, and what they are afterwards goes
back. So how a state moves on is the model's own code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

TRASH = 0
"""The slot of padding; no sequence has it."""
OTHER = (
    "it keeps something else than the keys and values of each token, or a state of one size, such "
    "as an index of keys"
)
"""Why a layer is not served."""


class StateName(NamedTuple):
    """A state of a model.

    Attributes:
        layer: that keeps it, by its number in the model.
        is_recurrent: whether it is a recurrent state, or the last inputs of a convolution.
        index: among the layer's states of that kind.
    """

    layer: int
    is_recurrent: bool
    index: int


@dataclass(frozen=True)
class State:
    """The shape and dtype of a state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class OtherState(ValueError):
    """A layer keeps something that is not served; `layer` is its number."""

    def __init__(self, layer: Any, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


class SlotLayer(LinearAttentionLayer):
    """A layer of a cache whose states are new tensors in each call, and never written to.

    Ranks that share a stage may write to nothing in place that they have computed in front of an
    exchange, and a layer may have one between its convolution and its recurrence.
    """

    def fill(self, name: StateName, rows: Tensor) -> None:
        """Give it a state, as if it had made it itself."""
        self.has_previous_state[name.index] = True
        states = self.recurrent_states if name.is_recurrent else self.conv_states
        states[name.index] = rows

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        before = self.conv_states[state_idx]
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            missing = max(width - conv_states.shape[-1], 0)
            shown = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            width = before.shape[-1]
            shown = torch.cat([before, conv_states], dim=-1)
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = shown[..., -width:]
        return shown

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Tensor:
        before = self.recurrent_states[state_idx]
        dtype = recurrent_states.dtype if before is None else before.dtype
        self.recurrent_states[state_idx] = state = recurrent_states.to(dtype)
        return state


@dataclass(frozen=True)
class Slots:
    """Where the states of a batch lie; the same for all layers of a stage.

    Attributes:
        pools: of each state, [slots, *its shape]; the first slot is for padding.
        numbers: int64 [rows], the slot of each row.
        begins: bool [rows], which rows begin their sequence; None if all do. In their slots is what
            another sequence has left.
    """

    pools: Mapping[StateName, Tensor]
    numbers: Tensor
    begins: Tensor | None

    @cached_property
    def _layers(self) -> dict[int, SlotLayer]:
        """The layers that have been asked for."""
        return {}

    def layer(self, number: int) -> SlotLayer:
        """The layer of a cache with the states of the batch.

        Raises:
            OtherState: the layer keeps none.
        """
        if number not in self._layers:
            names = [name for name in self.pools if name.layer == number]
            if not names:
                raise OtherState(number, OTHER)
            layer = SlotLayer(1 + max(name.index for name in names))
            if self.begins is not None:
                for name in names:
                    rows = self.pools[name].index_select(0, self.numbers)
                    fresh = self.begins.view(-1, *[1] * (rows.dim() - 1))
                    layer.fill(name, rows.masked_fill(fresh, 0))
            self._layers[number] = layer
        return self._layers[number]

    def keep(self) -> None:
        """Write the states as the layers have left them to their slots."""
        for name, pool in self.pools.items():
            layer = self.layer(name.layer)
            states = layer.recurrent_states if name.is_recurrent else layer.conv_states
            state = states[name.index]
            assert state is not None, f"{name} was observed"
            pool.index_copy_(0, self.numbers, state)


NO_SLOTS = Slots({}, torch.empty(0, dtype=torch.int64), None)
"""Those of a batch where no layer keeps a state."""


class ObservedLayer(LinearAttentionLayer):
    """A layer of the cache of one sequence that begins, which notes the states that it is given.

    It forgets them, so a model may run several times.

    Args:
        layer: its number.
        states: to which it adds.
    """

    def __init__(self, layer: int, states: dict[StateName, State]) -> None:
        super().__init__()
        self.layer, self.states = layer, states
        self.has_previous_state = defaultdict(bool)
        self.conv_states = defaultdict(lambda: None)
        self.recurrent_states = defaultdict(lambda: None)

    def __getattr__(self, name: str) -> Any:
        raise OtherState(self.layer, OTHER)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        fresh = SlotLayer(state_idx + 1)
        shown = fresh.update_conv_state(conv_states, state_idx, **options)
        state = fresh.conv_states[state_idx]
        assert state is not None, "it was given just now"
        self._note(False, state_idx, state)
        return shown

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Tensor:
        self._note(True, state_idx, recurrent_states)
        return recurrent_states

    def _note(self, is_recurrent: bool, index: int, state: Tensor) -> None:
        if state.shape[:1] != (1,):
            raise OtherState(
                self.layer, f"it keeps a state {list(state.shape)}, which is not of one sequence"
            )
        name = StateName(self.layer, is_recurrent, index)
        self.states[name] = State(tuple(state.shape[1:]), state.dtype)


class CacheLayers(list[Any]):
    """The layers of a paged cache: those with states, by number.

    Transformers takes it for an empty list, since keys and values are not in it.
    """

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def __getitem__(self, index: Any) -> Any:
        return self.slots.layer(index)


class ObservedLayers(CacheLayers):
    """Those of a model of which is not known what it keeps.

    Attributes:
        states: that layers have been given.
    """

    def __init__(self) -> None:
        super().__init__(NO_SLOTS)
        self.states: dict[StateName, State] = {}

    def __getitem__(self, index: Any) -> Any:
        return ObservedLayer(index, self.states)


def bytes_of(states: Mapping[StateName, State], layers: Sequence[int]) -> int:
    """Bytes of what some layers keep of a sequence."""
    return sum(state.bytes for name, state in states.items() if name.layer in layers)
