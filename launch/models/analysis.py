"""Observe a model's forward: the tensors between its layers, and the use and cost of each part.

The model's own forward runs once on fake tensors, which compute nothing. The run notes what each
layer takes, gives and depends on, so the architecture need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from .chain import Chain
from .dependence import Dependence


@dataclass(frozen=True)
class Boundary:
    """The tensors that go from a layer to the next one.

    Attributes:
        structure: of the earlier layer's output, as a pytree.
        leaves: of that pytree; tensors are replaced by None.
        moving: the leaves that the next layer takes: the position of each among the leaves, and
            among those of the next layer's arguments.
        refusal: why the model cannot be cut here; None if it can.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]
    moving: tuple[tuple[int, int], ...]
    refusal: str | None = None


@dataclass(frozen=True)
class Analysis:
    """The findings of a run of a model.

    Attributes:
        boundaries: what goes from layer i to layer i+1, at index i.
        before, after: the names of parameters that the model uses before its first layer and after
            its last one.
        layers: the names of parameters that each layer uses.
        flops: of the work before the layers, of each layer, and of the work after them.
    """

    boundaries: tuple[Boundary, ...]
    before: frozenset[str]
    after: frozenset[str]
    layers: tuple[frozenset[str], ...]
    flops: tuple[int, ...]


def analyse(model: nn.Module, chain: Chain, example: Mapping[str, Any]) -> Analysis:
    """Run a model's forward on fakes of example inputs.

    Raises:
        ValueError: it cannot run on fakes, or does not run each layer once, in order.
    """
    run = _AnalysisRun(model, chain)
    try:
        with run.watching():
            output = model(**run.fakes(example))
            run.end(output)
    except ValueError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be traced: what {error.func} gives has a shape, or is "
            "a number, that depends on the data. Take a form without it, such as experts='cg' for "
            "a mixture of experts of transformers"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on the example inputs "
            f"{', '.join(example) or '(none)'}: {type(error).__name__}: {error}; give "
            "cg.cut_layers inputs as the model takes them, example={name: tensor}"
        ) from error
    return run.analysis()


@dataclass
class _Layer:
    """The findings of a run about one layer."""

    taken: list[Any] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None
    read: int = 0


class _AnalysisRun:
    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self.model, self.chain = model, chain
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.dependence = Dependence()
        self.names: list[str] = []
        self.layers = [_Layer() for _ in chain.layers]
        self.flops = [0]
        self.last = 0
        self.inside = False
        self.entered = 0
        self.output = 0
        self.number = {id(layer): i for i, layer in enumerate(chain.layers)}

    # -- sources: a bit for each layer, then one for each parameter --------------------------

    def _bit(self, layer: int) -> int:
        return 1 << layer

    def _parameters(self, sources: int) -> frozenset[str]:
        shifted = sources >> len(self.layers)
        return frozenset(name for i, name in enumerate(self.names) if shifted >> i & 1)

    # -- running ------------------------------------------------------------------------------

    def fakes(self, example: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tree_map_only(torch.Tensor, self._fake, v) for name, v in example.items()}

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the `with` block the model holds fakes, and its layers are watched."""
        hooks = [
            hook
            for layer in self.chain.layers
            for hook in (
                layer.register_forward_pre_hook(self._enter, with_kwargs=True),
                layer.register_forward_hook(self._leave),
            )
        ]
        with _replaced(self.model, self._fake_parameter, self._fake):
            try:
                with torch.no_grad(), self.mode, self.dependence:
                    yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _fake_parameter(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        fake = self._fake(parameter)
        self.dependence.set_sources(fake, 1 << len(self.layers) + len(self.names))
        self.names.append(name)
        return fake

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self.number[id(module)]
        if self.inside or number != self.entered:
            raise ValueError(
                f"{type(self.model).__name__} runs {self.chain.path_of(number)} out of order, or "
                "more than once; cg.cut_layers cuts a model that runs its layers once, one after "
                "the other"
            )
        self.inside = True
        self.entered += 1
        layer = self.layers[number]
        layer.taken = tree_flatten((args, kwargs))[0]
        layer.sources = [self.dependence.sources_of(leaf) for leaf in layer.taken]
        self._count()
        self.dependence.read = 0

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        layer = self.layers[self.number[id(module)]]
        layer.given, layer.structure = tree_flatten(output)
        layer.read = self.dependence.read
        self.dependence.set_sources(output, self._bit(self.number[id(module)]))
        self._count()
        self.inside = False

    def _count(self) -> None:
        """End the count of the part that has run since the last call, and begin another."""
        self.flops[-1] = self.dependence.flops - self.last
        self.last = self.dependence.flops
        self.flops.append(0)

    def end(self, output: Any) -> None:
        self._count()
        if self.entered != len(self.layers):
            raise ValueError(
                f"{type(self.model).__name__} has run {self.entered} of the {len(self.layers)} "
                f"layers of '{self.chain.path}'; cg.cut_layers cuts a model that runs all of them"
            )
        self.output = self.dependence.sources_of(output)

    # -- the findings ------------------------------------------------------------------------

    def analysis(self) -> Analysis:
        owned = self._owners()
        inner = {name for name, owners in owned.items() if owners}
        before = self._parameters(_union(self.layers[0].sources)) - inner
        after = self._parameters(self.output) - inner
        used = [
            frozenset(name for name, owners in owned.items() if index in owners)
            | (self._parameters(layer.read) - (inner | before))
            for index, layer in enumerate(self.layers)
        ]
        return Analysis(
            tuple(self._boundary(i, owned) for i in range(1, len(self.layers))),
            before,
            after,
            tuple(used),
            self._costs(),
        )

    def _costs(self) -> tuple[int, ...]:
        """The operations before the layers, of each layer up to the next, and after the layers."""
        before, *rest = self.flops[:-1]
        layers, between = rest[0::2], rest[1::2]
        return (
            before,
            *(a + b for a, b in zip(layers, [*between[:-1], 0], strict=True)),
            between[-1],
        )

    def _owners(self) -> dict[str, set[int]]:
        """The layers that hold each parameter."""
        name_of = {id(p): name for name, p in reversed(list(self.model.named_parameters()))}
        owners: dict[str, set[int]] = {name: set() for name in self.names}
        for index, layer in enumerate(self.chain.layers):
            for parameter in layer.parameters():
                owners[name_of[id(parameter)]].add(index)
        return owners

    def _boundary(self, index: int, owned: Mapping[str, set[int]]) -> Boundary:
        earlier, later = self.layers[index - 1], self.layers[index]
        assert earlier.structure is not None
        place = {id(leaf): i for i, leaf in enumerate(earlier.given) if _is_tensor(leaf)}
        moving = {
            place[id(leaf)]: i
            for i, leaf in reversed(list(enumerate(later.taken)))
            if _is_tensor(leaf) and id(leaf) in place
        }
        leaves = tuple(None if _is_tensor(leaf) else leaf for leaf in earlier.given)
        return Boundary(
            earlier.structure,
            leaves,
            tuple(sorted(moving.items())),
            self._refusal(index, set(moving.values()), owned),
        )

    def _refusal(self, index: int, moving: set[int], owned: Mapping[str, set[int]]) -> str | None:
        """Why the model cannot be cut in front of a layer."""
        first = self.chain.path_of(index)
        behind = self.chain.path_of(index - 1)
        if not moving:
            return f"{first} takes nothing that {behind} gives"
        for position, sources in enumerate(self.layers[index].sources):
            if position not in moving and sources & self._bit(index - 1):
                return f"the model changes what {behind} gives before {first} takes it"
        earlier = self._bit(index) - 1
        for number in range(index, len(self.layers) + 1):
            taker = "the model" if number == len(self.layers) else self.chain.path_of(number)
            sources = (
                self.output if number == len(self.layers) else _union(self.layers[number].sources)
            )
            crossing = sources & earlier
            if number == index:
                crossing &= ~self._bit(index - 1)
            if crossing:
                giver = self.chain.path_of(crossing.bit_length() - 1)
                return f"{taker} takes what {giver} gives, other than by the layers between them"
            if number == len(self.layers):
                break
            for name in sorted(self._parameters(sources)):
                owners = owned[name]
                if owners and min(owners) < index and number not in owners:
                    return f"{taker} takes what {self.chain.path_of(min(owners))} makes inside"
                if not owners:
                    return f"{taker} takes a value that the parameter '{name}' makes"
        return None


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


def _union(sources: Sequence[int]) -> int:
    union = 0
    for bits in sources:
        union |= bits
    return union


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
