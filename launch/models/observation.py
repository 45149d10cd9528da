"""Observe a model's forward: what its layers and modules give, and what that depends on.

The model's own forward runs once on fake tensors, which compute nothing. The run notes what each
layer takes, gives and depends on, so the architecture need not be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from .chain import Chain
from .dependence import Dependence
from .fake_run import FakeRun


@dataclass(frozen=True)
class ParameterSource:
    """A parameter, by its name."""

    name: str


@dataclass(frozen=True)
class InsideSource:
    """Tensors that a layer computes and does not give as its output."""

    layer: int


@dataclass(frozen=True)
class RandomSource:
    """Random numbers that are drawn outside of the layers.

    Attributes:
        drawn: the number of layers that have run before.
    """

    drawn: int


@dataclass(frozen=True)
class OutputSlot:
    """A place in the output of a module.

    Attributes:
        path: of the module.
        position: among the leaves of its output.
        ready: the number of layers that have run before; a layer's own number for its own.
    """

    path: str
    position: int
    ready: int


@dataclass(eq=False)
class GivenTensor:
    """A tensor that modules give: layers, and others that run once, outside of the layers.

    Attributes:
        tensor: in the run a fake of it, and then a tensor without memory of its shape and type.
        version: of the fake, when it was first given.
        depends: the sources of what it was computed from.
        slots: its places in outputs, in the order of the run; empty if none can stand for it.
        is_changed: whether the model has written into it.
    """

    tensor: torch.Tensor
    version: int
    depends: int
    slots: list[OutputSlot]
    is_changed: bool = False

    def is_ready(self, start: int) -> bool:
        """Whether a module gives it before the layer in front of the one numbered `start` ends."""
        return bool(self.slots) and self.slots[0].ready < start


SourceOfTensor: TypeAlias = ParameterSource | InsideSource | RandomSource | GivenTensor


@dataclass(frozen=True)
class ModuleOutput:
    """The output of a module, as a pytree.

    Attributes:
        structure: of it.
        leaves: tensors as in `GivenTensor`, and what is no tensor as it is.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]


@dataclass
class Observation:
    """The findings of a run.

    Attributes:
        chain: the layers that were observed.
        sources: a bit of the masks stands for each.
        taken: of each layer, the leaves of its arguments.
        uses: of each layer, a mask of what its arguments and operands depend on.
        output: a mask of what the model's output depends on.
        owners: of each parameter, the layers that hold it.
        outputs: of modules that give tensors, by path.
        flops: of the work before the layers, of each layer, and of the work after them.
    """

    chain: Chain
    sources: list[SourceOfTensor] = field(default_factory=list)
    taken: list[list[Any]] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    output: int = 0
    owners: dict[str, set[int]] = field(default_factory=dict)
    outputs: dict[str, ModuleOutput] = field(default_factory=dict)
    flops: tuple[int, ...] = ()


def observe(model: nn.Module, chain: Chain, example: Mapping[str, Any]) -> Observation:
    """Run a model's forward on fakes of example inputs.

    Raises:
        ValueError: it cannot run on fakes, or does not run each layer once, in order.
    """
    run = _ObservedRun(model, chain)
    hooks = run.hooks()
    try:
        output = FakeRun(model, example).run(run.dependence, run.note_parameter)
    finally:
        for hook in hooks:
            hook.remove()
    return run.end(output)


class _ObservedRun:
    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self.model, self.chain = model, chain
        self.dependence = Dependence()
        self.observation = Observation(chain)
        self.number = {id(layer): i for i, layer in enumerate(chain.layers)}
        self.path: dict[int, str] = {}
        self.output_bits: dict[int, int] = {}  # the bits of tensors that modules have given
        self.running: int | None = None
        self.entered = self.last = 0
        self.flops = [0]
        self.calls: set[str] = set()
        self._draw()

    def hooks(self) -> list[Any]:
        within = {id(m) for layer in self.chain.layers for m in layer.modules()}
        hooks: list[Any] = []
        for layer in self.chain.layers:
            hooks += [
                layer.register_forward_pre_hook(self._enter, with_kwargs=True),
                layer.register_forward_hook(self._leave),
            ]
        for path, module in self.model.named_modules():
            if path and id(module) not in within:
                self.path[id(module)] = path
                hooks.append(module.register_forward_hook(self._give, with_kwargs=True))
        return hooks

    def _bit(self, source: SourceOfTensor) -> int:
        self.observation.sources.append(source)
        return 1 << len(self.observation.sources) - 1

    def note_parameter(self, name: str, fake: torch.Tensor) -> None:
        self.dependence.set_sources(fake, self._bit(ParameterSource(name)))
        self.observation.owners[name] = set()

    # -- hooks --------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self.number[id(module)]
        if self.running is not None or number != self.entered:
            raise ValueError(
                f"{type(self.model).__name__} runs {self.chain.paths[number]} out of order, or "
                "more than once; cg.cut_layers cuts a model that runs its layers once, one after "
                "the other. Let one actor hold the whole model, on a mesh that cuts the batch or "
                "tensors"
            )
        self.running = number
        self.entered += 1
        self._count()
        taken = tree_flatten((args, kwargs))[0]
        self.observation.taken.append(taken)
        self.observation.uses.append(self.dependence.sources_of(taken))
        self.dependence.read, self.dependence.random = 0, 0
        self.dependence.inside = self._bit(InsideSource(number))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        number = self.number[id(module)]
        own = self.dependence.inside
        self.observation.uses[number] |= self.dependence.read & ~own
        self.dependence.inside = 0
        path, taken = self.chain.paths[number], self.observation.taken[number]
        for position, leaf in self._outputs(path, output):
            slot = OutputSlot(path, position, number)
            self._note_given(slot, leaf, passed=_holds(taken, leaf))
        self._count()
        self._draw()
        self.running = None

    def _give(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what a module outside of the layers gives, unless it is called again, or by one."""
        path = self.path[id(module)]
        if path in self.calls or self.running is not None:
            self.calls.add(path)
            self._forget(path)
            return
        self.calls.add(path)
        taken = tree_flatten((args, kwargs))[0]
        leaves, _ = tree_flatten(output)
        computed = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not _holds(taken, leaf)
        ]
        if self.dependence.sources_of(computed) and all(map(_is_constant, leaves)):
            for position, leaf in self._outputs(path, output):
                slot = OutputSlot(path, position, self.entered)
                self._note_given(slot, leaf, passed=_holds(taken, leaf))

    def _outputs(self, path: str, output: Any) -> list[tuple[int, torch.Tensor]]:
        leaves, structure = tree_flatten(output)
        self.observation.outputs[path] = ModuleOutput(structure, tuple(leaves))
        return [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def _note_given(self, slot: OutputSlot, leaf: torch.Tensor, passed: bool) -> None:
        """Record that a module gives a tensor; `passed` if it was given that tensor itself."""
        bit = self.output_bits.get(id(leaf))
        if bit is None:
            depends = self.dependence.sources_of(leaf)
            bit = self._bit(GivenTensor(leaf, leaf._version, depends, [slot]))
            self.output_bits[id(leaf)] = bit
            self.dependence.set_sources(leaf, bit | (depends if passed else 0))
        else:
            known = self.observation.sources[bit.bit_length() - 1]
            assert isinstance(known, GivenTensor)
            known.slots.append(slot)

    def _forget(self, path: str) -> None:
        """Have a module give nothing: it runs more than once, and not only in one stage."""
        for source in self.observation.sources:
            if isinstance(source, GivenTensor):
                source.slots[:] = [slot for slot in source.slots if slot.path != path]

    def _draw(self) -> None:
        self.dependence.random = self._bit(RandomSource(self.entered))

    def _count(self) -> None:
        """End the count of the part that has run since the last call, and begin another."""
        self.flops[-1] = self.dependence.flops - self.last
        self.last = self.dependence.flops
        self.flops.append(0)

    def end(self, output: Any) -> Observation:
        self._count()
        count = len(self.chain.layers)
        if self.entered != count:
            raise ValueError(
                f"{type(self.model).__name__} has run {self.entered} of the {count} layers of "
                f"{self.chain.name}; cg.cut_layers cuts a model that runs all of them"
            )
        observation = self.observation
        observation.output = self.dependence.sources_of(output)
        name_of = {id(p): name for name, p in reversed(list(self.model.named_parameters()))}
        for index, layer in enumerate(self.chain.layers):
            for parameter in layer.parameters():
                observation.owners[name_of[id(parameter)]].add(index)
        observation.flops = self._costs()
        self._let_go_of_fakes()
        return observation

    def _let_go_of_fakes(self) -> None:
        """Put tensors without memory in the place of fakes.

        Stages hold what is observed, and are copied. A copy of a fake copies its mode, whose weak
        references to storages are then given back twice, which corrupts the heap.
        """
        observation, metas = self.observation, _Metas()
        for source in observation.sources:
            if isinstance(source, GivenTensor):
                source.is_changed = source.tensor._version != source.version
                source.tensor = metas.of(source.tensor)
        observation.taken = [[metas.of(leaf) for leaf in leaves] for leaves in observation.taken]
        observation.outputs = {
            path: replace(output, leaves=tuple(map(metas.of, output.leaves)))
            for path, output in observation.outputs.items()
        }

    def _costs(self) -> tuple[int, ...]:
        """The operations before the layers, of each layer up to the next, and after the layers."""
        before, *rest = self.flops[:-1]
        layers, between = rest[0::2], rest[1::2]
        return (
            before,
            *(a + b for a, b in zip(layers, [*between[:-1], 0], strict=True)),
            between[-1],
        )


class _Metas:
    """Tensors without memory that stand for others; the same one for the same tensor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with what it stands for

    def of(self, leaf: Any) -> Any:
        """The tensor that stands for a leaf; what is no tensor as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._known:
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            self._known[id(leaf)] = leaf, meta
        return self._known[id(leaf)][1]


def _holds(leaves: Sequence[Any], tensor: torch.Tensor) -> bool:
    return any(leaf is tensor for leaf in leaves)


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf is a tensor, or the same in each run; a number may count the rows."""
    return leaf is None or isinstance(leaf, torch.Tensor | bool | str)
