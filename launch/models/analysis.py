"""Decide what crosses from stage to stage of a model, and what each stage uses, from one run of it.

A stage runs the model's own code from its beginning. Of what layers and modules have given before
its first layer, it needs some: what its own layers, and what comes after them, are computed from.
These tensors enter it. The rest it computes again, of the inputs and of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .chain import Chain
from .observation import (
    GivenTensor,
    InsideSource,
    ModuleOutput,
    Observation,
    ParameterSource,
    RandomSource,
    observe,
)


@dataclass(frozen=True)
class Boundary:
    """The tensors that go from the layers before a place in the chain to those behind it.

    Attributes:
        moving: they, in the order in which they are given.
        taken: the position of each among the leaves of the arguments of the layer behind; None if
            that does not take it as it is.
        refusal: why the model cannot be cut here; None if it can.
    """

    moving: tuple[GivenTensor, ...]
    taken: tuple[int | None, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class _Needs:
    """The sources of the values of a part of a forward.

    Attributes:
        tensors: those that are given before it.
        parameters: by name.
        inside: layers before it that compute something that it takes, and do not give it.
        is_random: whether it takes random numbers that are drawn before it.
    """

    tensors: tuple[GivenTensor, ...]
    parameters: frozenset[str]
    inside: tuple[int, ...]
    is_random: bool


class Analysis:
    """The needs and costs of the stages of a model.

    Attributes:
        boundaries: what goes from layer i to layer i+1 and later, at index i.
        before, after: the names of parameters that the model uses before its first layer and after
            its last one.
        layers: the names of parameters that each layer uses, or what comes right before it.
        inner: the names of parameters of the layers.
        flops: of the work before the layers, of each layer, and of the work after them.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._count = len(observation.chain.layers)
        self._owned = [
            frozenset(n for n, owners in observation.owners.items() if index in owners)
            for index in range(self._count)
        ]
        self.flops = observation.flops
        self.inner = frozenset().union(*self._owned)
        self.boundaries = tuple(self._boundary(index) for index in range(1, self._count))
        self.before = self._needs(observation.uses[0], 0).parameters - self.inner
        self.after = self._needs(observation.output, self._count).parameters - self.inner
        self.layers = tuple(
            owned | (self._needs(observation.uses[i], i).parameters - self.inner - self.before)
            for i, owned in enumerate(self._owned)
        )

    @property
    def outputs(self) -> Mapping[str, ModuleOutput]:
        """The outputs of layers, and of other modules that give tensors, by path."""
        return self._observation.outputs

    def used(self, layers: range) -> frozenset[str]:
        """The parameters that the part of the forward with these layers uses."""
        roots, stop = 0, layers.stop
        for index in layers:
            roots |= self._observation.uses[index]
        if stop == self._count:
            roots |= self._observation.output
        else:
            for tensor in self.boundaries[stop - 1].moving:
                roots |= 0 if tensor.is_ready(layers.start) else tensor.depends
        needs = self._needs(roots, layers.start)
        return needs.parameters.union(*(self._owned[index] for index in layers))

    def _sources(self, mask: int) -> Iterator[Any]:
        for index, source in enumerate(self._observation.sources):
            if mask >> index & 1:
                yield source

    def _needs(self, roots: int, start: int) -> _Needs:
        """The sources of values, in a part whose first layer has the number `start`."""
        pending = seen = roots
        tensors: list[GivenTensor] = []
        while pending:
            further = 0
            for source in self._sources(pending):
                if isinstance(source, GivenTensor):
                    if source.is_ready(start):
                        tensors.append(source)
                    else:
                        further |= source.depends
            pending = further & ~seen
            seen |= pending
        sources = list(self._sources(seen))
        return _Needs(
            tuple(tensors),
            frozenset(source.name for source in sources if isinstance(source, ParameterSource)),
            tuple(s.layer for s in sources if isinstance(s, InsideSource) and s.layer < start),
            any(isinstance(source, RandomSource) and source.drawn < start for source in sources),
        )

    def _boundary(self, index: int) -> Boundary:
        uses = self._observation.uses[index:]
        roots = self._observation.output
        for mask in uses:
            roots |= mask
        moving = self._moving(self._needs(roots, index).tensors)
        place = {
            id(leaf): i for i, leaf in reversed(list(enumerate(self._observation.taken[index])))
        }
        return Boundary(
            moving,
            tuple(place.get(id(tensor.tensor)) for tensor in moving),
            self._refusal(index, moving),
        )

    def _moving(self, tensors: tuple[GivenTensor, ...]) -> tuple[GivenTensor, ...]:
        """Those of the tensors given before that are not computed again.

        A module computes again what depends on inputs alone, such as positions, unless something
        stands for it as another tensor that it gives goes on.
        """
        paths = {*self._observation.chain.paths}
        while True:
            moving = tuple(
                t for t in tensors if t.depends or any(slot.path in paths for slot in t.slots)
            )
            reached = paths.union(slot.path for tensor in moving for slot in tensor.slots)
            if reached == paths:
                return moving
            paths = reached

    def _refusal(self, index: int, moving: tuple[GivenTensor, ...]) -> str | None:
        """Why the model cannot be cut in front of a layer."""
        paths = self._observation.chain.paths
        if not moving:
            return f"nothing that {paths[index - 1]} or what is before it gives is used behind it"
        for tensor in moving:
            if tensor.is_changed:
                return f"the model writes into what {tensor.slots[0].path} has given"
        for number, mask in enumerate(
            [*self._observation.uses[index:], self._observation.output], index
        ):
            taker = "the model's output" if number == self._count else paths[number]
            needs = self._needs(mask, index)
            if needs.inside:
                return (
                    f"{taker} takes what {paths[needs.inside[-1]]} computes inside and does not "
                    "give as its output"
                )
            if needs.is_random:
                return (
                    f"{taker} takes random numbers that are drawn before {paths[index - 1]} has "
                    "run, and each stage would draw others; set this dropout of the model to 0"
                )
        return None


def analyse(model: nn.Module, chain: Chain, example: Mapping[str, Any]) -> Analysis:
    """Run a model's forward on fakes of example inputs, and decide what its stages need.

    Raises:
        ValueError: it cannot run on fakes, or does not run each layer once, in order.
    """
    return Analysis(observe(model, chain, example))
