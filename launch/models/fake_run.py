"""Run a model on fake tensors, which have shapes and hold nothing; and the order of its layers."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...tracer.errors import TraceError, UnknownRowsError
from ...tracer.function_runs import run_plainly
from ...tracer.method.assertions.assertions import asserted
from ...tracer.method.attention.varlen_calls import attention_traced
from ...tracer.method.purity.as_eager import compiled_as_eager
from ...tracer.method.purity.randomness import draws_bounded
from ...tracer.method.rows.row_programs import UNHANDLED, RowPrograms
from ...tracer.source import traceback_location
from ...tracer.values.actor_state import reach
from ...tracer.values.heap.snapshot import Snapshot
from .chain import Chain, LayerList, largest_lists
from .dependence import Dependence
from .experts import has_other_experts


class FakeRun:
    """Fake tensors in the place of a model's tensors, and of example inputs.

    Args:
        model: that runs.
        example: its inputs by name.
    """

    def __init__(self, model: nn.Module, example: Mapping[str, Any]) -> None:
        self.model, self.example = model, example
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def run(
        self,
        watcher: Dependence,
        note: Callable[[str, torch.Tensor], None] = lambda name, fake: None,
    ) -> Any:
        """Run the model, without gradients, and undo what it has changed of itself.

        Args:
            watcher: the mode in which the model runs.
            note: told the name and the fake of each parameter, before the run.

        Returns:
            The output, of fake tensors.

        Raises:
            ValueError: the model cannot run on the example.
        """

        def parameter(name: str, tensor: torch.Tensor) -> torch.Tensor:
            fake = self.fake(tensor)
            note(name, fake)
            return fake

        inputs = {k: tree_map_only(torch.Tensor, self.fake, v) for k, v in self.example.items()}
        try:
            with (
                _undone(self.model, watcher),
                _replaced(self.model, parameter, self.fake),
                torch.no_grad(),
                self.mode,
                compiled_as_eager(),
                attention_traced(type(self.model).__name__),
                draws_bounded(type(self.model).__name__),
                _StaticCalls(),
                watcher,
            ):
                return self.model(**inputs)
        except ValueError:
            raise
        except UnknownRowsError as error:
            raise ValueError(f"{type(self.model).__name__} cannot be traced: {error}") from error
        except TraceError as error:
            raise ValueError(str(error)) from error
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _data_dependent(self.model, error) from error
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} does not run on the example inputs "
                f"{', '.join(self.example) or '(none)'}: {type(error).__name__}: {error}; give "
                "cg.cut_layers inputs as the model takes them, example={name: tensor}"
            ) from error


class _StaticCalls(TorchFunctionMode):
    """Inside the `with` block assertions hold, and chosen rows have static shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowPrograms()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._rows.answer(func, args, kwargs, run_plainly)
        if result is not UNHANDLED:
            return result
        held = asserted(func, args, sys._getframe(1), lambda *_: None)
        return func(*args, **kwargs) if held is None else held


def _data_dependent(
    model: nn.Module, error: DataDependentOutputException | DynamicOutputShapeException
) -> ValueError:
    """The error for a model of which a shape, or a number in Python, depends on the data."""
    location = traceback_location(error.__traceback__)
    line = "" if location is None else linecache.getline(location.file, location.line).strip()
    if line.startswith("assert "):
        remedy = "It is in an assertion: python -O leaves assertions out (PYTHONOPTIMIZE=1)"
    elif has_other_experts(model):
        remedy = "Take the form of its experts without it, experts='cg'"
    else:
        remedy = (
            "Take a form without it: in the place of a mixture of experts that loops over those "
            "that the data chooses, a module that multiplies by cg.expert_linear, and "
            "layerdrop=0.0 for layers that are left out at random"
        )
    at = "" if location is None else f", at {location}"
    return ValueError(
        f"{type(model).__name__} cannot be traced: what {error.func} gives has a shape, or is a "
        f"number, that depends on the data{at}. {remedy}"
    )


def order_layers(
    model: nn.Module, lists: Sequence[LayerList], example: Mapping[str, Any], chosen: bool
) -> Chain:
    """The layers of lists, in the order in which the model runs them.

    Of lists that the user has not `chosen` the largest ones count, among those that the model runs:
    encoders of images and sounds do not run on a text. Those after the first one of them are left
    out if the model does not run their layers once, in order, and outside of other layers. Whether
    it does so with that one is seen when the run is observed.

    Raises:
        ValueError: the model cannot run on the example.
    """
    if len(lists) == 1:
        return Chain.of(lists, [(0, index) for index in range(len(lists[0].layers))])
    entered, nested = _entered(model, lists, example)
    kept = list(range(len(lists)))
    if not chosen:
        ran = sorted({number for number, _ in entered})
        first, *others = map(lists.index, largest_lists([lists[n] for n in ran] or lists))
        in_order = [n for n in others if n not in nested and _in_order(n, lists, entered)]
        kept = [first, *in_order]
    every = ((n, i) for n in kept for i in range(len(lists[n].layers)))
    order = list(dict.fromkeys([*(at for at in entered if at[0] in kept), *every]))
    numbers = list(dict.fromkeys(number for number, _ in order))
    return Chain.of([lists[n] for n in numbers], [(numbers.index(n), i) for n, i in order])


def _in_order(number: int, lists: Sequence[LayerList], entered: Sequence[tuple[int, int]]) -> bool:
    count = len(lists[number].layers)
    return [index for other, index in entered if other == number] == list(range(count))


def _entered(
    model: nn.Module, lists: Sequence[LayerList], example: Mapping[str, Any]
) -> tuple[list[tuple[int, int]], set[int]]:
    """The layers that a run enters, in order, and the lists with layers that run inside others."""
    number_of = {
        id(layer): (number, index)
        for number, layer_list in enumerate(lists)
        for index, layer in enumerate(layer_list.layers)
    }
    entered: list[tuple[int, int]] = []
    running: list[int] = []
    nested: set[int] = set()

    def enter(module: nn.Module, args: Any) -> None:
        number, index = number_of[id(module)]
        nested.update([number, *running] if running else [])
        entered.append((number, index))
        running.append(number)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    layers = [layer for layer_list in lists for layer in layer_list.layers]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        FakeRun(model, example).run(Dependence())
    finally:
        for hook in hooks:
            hook.remove()
    return entered, nested


@contextmanager
def _undone(model: nn.Module, watcher: Dependence) -> Iterator[None]:
    """Undo what the `with` block changes of a model: states of layers would stay fake tensors.

    A table that depends on no input and no parameter stays, as that of a rotary embedding for long
    texts: who makes the model real makes it real, too.
    """
    state = reach(model)
    snapshot = Snapshot((*state.containers, *state.others))
    try:
        yield
    finally:
        tables = [
            change
            for change in snapshot.changes()
            if isinstance(change.after, torch.Tensor) and not watcher.sources_of(change.after)
        ]
        snapshot.restore()
        for table in tables:
            table.put(table.after)


@contextmanager
def _replaced(
    model: nn.Module,
    parameter: Callable[[str, torch.Tensor], torch.Tensor],
    buffer: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Inside the `with` block other tensors stand in for a model's; tied ones stay tied."""
    replacements: dict[int, torch.Tensor] = {
        id(tensor): parameter(name, tensor) for name, tensor in model.named_parameters()
    }
    replacements |= {id(tensor): buffer(tensor) for _, tensor in model.named_buffers()}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for slots in holders:
                undo += [
                    (slots, key, tensor) for key, tensor in slots.items() if tensor is not None
                ]
        for slots, key, tensor in undo:
            slots[key] = replacements[id(tensor)]
        yield
    finally:
        for slots, key, tensor in undo:
            slots[key] = tensor
