"""A model that is cut: the contents of each stage, and the modules of the stages."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import nn

from .analysis import Analysis, Boundary
from .chain import Chain
from .part import MissingParameter, ModelPart, PartEntry, PartExit, Passage


@dataclass(frozen=True)
class ModelCosts:
    """The costs of the parts of a model.

    Attributes:
        unit: in words.
        values: of the work before the layers, of each layer, and of the work after them.
    """

    unit: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class StageOfModel:
    """The contents of one stage of a cut model.

    Attributes:
        layers: the numbers of its layers.
        parameters: their names, in the order of the model; a tied one has the first of its names.
        borrowed: the names of those that it uses and an earlier stage has.
        lent: the names of its own that later stages use.
        elements, bytes: of its parameters.
        cost: of one forward, in the unit of the costs by which the model was cut.
    """

    layers: range
    parameters: tuple[str, ...]
    borrowed: tuple[str, ...]
    lent: tuple[str, ...]
    elements: int
    bytes: int
    cost: float


class Cuts(Sequence[StageOfModel]):
    """A model that is cut into stages; `str` of it is a table.

    Attributes:
        model: the whole model.
        costs: by which it was cut.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        analysis: Analysis,
        lengths: list[int],
        costs: ModelCosts,
    ) -> None:
        self.model, self.costs = model, costs
        self._chain, self._analysis = chain, analysis
        self._parameters = dict(model.named_parameters())
        self._stages = self._share_out(lengths)

    @overload
    def __getitem__(self, index: int) -> StageOfModel: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StageOfModel]: ...
    def __getitem__(self, index: int | slice) -> StageOfModel | Sequence[StageOfModel]:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def part(self, index: int) -> ModelPart:
        """Make the module of a stage, with copies of its tensors.

        If the model is on the meta device, so are the copies, until an actor fills them (`init=`).
        """
        layers = self[index].layers
        entering, leaving = self._boundary(layers.start), self._boundary(layers.stop)
        passage = Passage(entering, leaving)
        modules = dict(self.model.named_modules(remove_duplicate=False))
        # `deepcopy` takes what its memo has for copies, so these are not copied.
        memo: dict[int, Any] = {}
        absent = self._modules_before(index)
        for path in absent:
            give = passage.stand_for(self._analysis.outputs[path], path)
            memo[id(modules[path])] = PartEntry(modules[path], give)
        if leaving:
            for path in self._chain.paths[layers.stop :]:
                memo[id(modules[path])] = PartExit(modules[path], passage, leaving)
            absent += self._chain.paths[layers.stop :]
        missing = list(self._missing(self[index], absent))
        memo |= {id(self._parameters[place.name]): None for place in missing}
        part = copy.deepcopy(self.model, memo)
        for tensor in passage.must_keep(leaving) if leaving else ():
            slot = tensor.slots[0]
            keep = functools.partial(passage.keep, tensor, slot.position)
            part.get_submodule(slot.path).register_forward_hook(keep)
        return ModelPart(part, missing, self[index].borrowed, self[index].lent, passage)

    def _boundary(self, index: int) -> Boundary | None:
        """The boundary in front of a layer, if there are layers on both sides."""
        return self._analysis.boundaries[index - 1] if 0 < index < len(self._chain.layers) else None

    def _modules_before(self, index: int) -> tuple[str, ...]:
        """The paths of the layers before a stage, and of other modules whose output enters it."""
        start = self[index].layers.start
        entering = self._boundary(start)
        slots = [slot for tensor in (entering.moving if entering else ()) for slot in tensor.slots]
        others = [slot.path for slot in slots if slot.ready < start]
        return tuple(dict.fromkeys([*self._chain.paths[:start], *others]))

    def _missing(self, stage: StageOfModel, absent: tuple[str, ...]) -> Iterator[MissingParameter]:
        """The places in a stage's model whose parameters the stage does not have."""
        own_names = set(stage.parameters)
        first = {id(p): name for name, p in self._parameters.items()}
        prefixes = tuple(f"{path}." for path in absent)
        for path, parameter in self.model.named_parameters(remove_duplicate=False):
            name = first[id(parameter)]
            if name not in own_names and not path.startswith(prefixes):
                yield MissingParameter(path, name, parameter.shape, parameter.dtype)

    def _share_out(self, lengths: list[int]) -> tuple[StageOfModel, ...]:
        bounds = [0, *itertools.accumulate(lengths)]
        runs = [range(a, b) for a, b in itertools.pairwise(bounds)]
        used = [set(self._analysis.used(run)) for run in runs]
        idle = self._parameters.keys() - set().union(*used)  # saved with the model, for all that
        used[0] |= idle
        have: list[list[str]] = [[] for _ in runs]
        lent: list[list[str]] = [[] for _ in runs]
        borrowed: list[list[str]] = [[] for _ in runs]
        for name, parameter in self._parameters.items():
            users = [i for i, names in enumerate(used) if name in names]
            if len(users) > 1 and parameter.requires_grad:
                lent[users[0]].append(name)
                for user in users[1:]:
                    borrowed[user].append(name)
                users = users[:1]
            for user in users:
                have[user].append(name)
        return tuple(
            self._stage(run, *map(tuple, names))
            for run, *names in zip(runs, have, borrowed, lent, strict=True)
        )

    def _stage(
        self,
        layers: range,
        parameters: tuple[str, ...],
        borrowed: tuple[str, ...],
        lent: tuple[str, ...],
    ) -> StageOfModel:
        before, *layer_costs, after = self.costs.values
        cost = sum(layer_costs[i] for i in layers)
        cost += before if layers.start == 0 else 0
        cost += after if layers.stop == len(layer_costs) else 0
        tensors = [self._parameters[name] for name in parameters]
        elements = sum(p.numel() for p in tensors)
        size = sum(p.numel() * p.element_size() for p in tensors)
        return StageOfModel(layers, parameters, borrowed, lent, elements, size, cost)

    # -- the table ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        count, place = len(self._chain.layers), self._chain.name
        head = f"{type(self.model).__name__}: {count} layers in {place}, {len(self)} stages"
        dearest = max((stage.cost for stage in self), default=0.0) or 1.0
        rows = [("stage", "layers", "parameters", self.costs.unit, "of the dearest", "besides")]
        for index, stage in enumerate(self):
            rows.append(
                (
                    str(index),
                    f"{stage.layers.start}-{stage.layers.stop - 1}",
                    f"{stage.elements:,}",
                    f"{stage.cost:,.6g}" if self.costs.unit == "as given" else f"{stage.cost:,}",
                    f"{stage.cost / dearest:.0%}",
                    self._besides(stage),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (1, 5) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])

    def _besides(self, stage: StageOfModel) -> str:
        """Return what a stage has beside its layers, in words."""
        inner = self._analysis.inner
        modules = dict.fromkeys(
            name.rpartition(".")[0] or name for name in stage.parameters if name not in inner
        )
        words = [_few(list(modules))] if modules else []
        words += [f"uses {name} of stage {self._owner(name)}" for name in stage.borrowed]
        return ", ".join(words)

    def _owner(self, name: str) -> int:
        return next(i for i, stage in enumerate(self) if name in stage.lent)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
