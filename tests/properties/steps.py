"""From a recipe to a step: the Python function that is traced, and that is run eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import cg

from .recipes import ROWS, WIDTH, WRITES, Block, Line, Recipe


@dataclass(frozen=True)
class Weight:
    """A weight, its actor, and how often that had been written to when the weight was read."""

    value: Tensor
    actor: int
    writes: int


@dataclass
class Values:
    """The values that a step has made: hidden tensors [rows, WIDTH], and other kinds apart."""

    hidden: list[Tensor]
    integers: list[Tensor]
    weights: list[Weight] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    carried: list[Tensor] = field(default_factory=list)
    writes: Counter[int] = field(default_factory=Counter)

    def at(self, index: int) -> Tensor:
        """A hidden value, counted from the latest one."""
        return self.hidden[-1 - index % len(self.hidden)]

    def inner(self, x: Tensor, k: Tensor) -> Values:
        """The values at hand in a microbatch."""
        return Values([x], [k], list(self.weights), list(self.objects), writes=self.writes)

    def read_weight(self, actors: Sequence[Any], index: int) -> None:
        """Let an actor give its weight away."""
        self.weights.append(Weight(actors[index].weight(), index, self.writes[index]))

    def fresh_weights(self) -> list[Tensor]:
        """The weights of actors that have not been written to since; a step may use no others."""
        return [w.value for w in self.weights if w.writes == self.writes[w.actor]]


def make_step(recipe: Recipe, actors: Sequence[Any]) -> Callable[..., Any]:
    """The step of a recipe over actors; it takes x float64[ROWS, WIDTH], k int64[ROWS], an object.

    It returns a dictionary of what the recipe says, which is never all that it has made.
    """

    def step(x: Tensor, k: Tensor, label: Any) -> dict[str, Any]:
        values = Values([x], [k], objects=[label])
        shown: list[Any] = []
        for block in recipe.blocks:
            ends = block is recipe.blocks[-1] and _ends_inside(recipe)
            _run_block(block, actors, values, shown, ends)
        total = None
        if recipe.trained:
            # The first actor is trained; so each loss has something that requires a gradient.
            if not _ends_inside(recipe):
                values.losses.append(actors[0].loss(actors[0].linear(values.hidden[-1])))
            total = cg.mean(values.losses)
            cg.backward(total, values.losses[-1] * 0.5)
        elif values.losses:
            total = cg.mean(values.losses)
        for index in recipe.updates:
            actors[index].update()
        return {
            "loss": total,
            "values": [values.at(index) for index in recipe.returned],
            "twice": [actors[-1].half(x), actors[-1].half(x)],
            "shown": tuple(shown),
            "integers": values.integers[-1],
            "objects": values.objects[-2:],
            "static": len(actors),
        }

    return step


def _ends_inside(recipe: Recipe) -> bool:
    last = recipe.blocks[-1]
    return recipe.trained and recipe.inside and last.microbatches > 0 and not last.trained


def _run_block(
    block: Block, actors: Sequence[Any], values: Values, shown: list[Any], ends: bool
) -> None:
    x, k = values.hidden[-1], values.integers[-1]
    if block.trained:
        # Its backward ends here: a later one must not come through the same calls.
        x = x.detach()
        values.weights.clear()
        values.carried.clear()
    if not block.microbatches:
        parts = [_run_lines(block, actors, values.inner(x, k), ends)]
    else:
        pieces = cg.microbatches((x, k), block.microbatches)
        given = values.carried if len(values.carried) == block.microbatches else []
        parts = []
        for index, (mx, mk) in enumerate(pieces):
            inner = values.inner(mx, mk)
            if block.carried and given:
                inner.hidden.append(given[index])
            parts.append(_run_lines(block, actors, inner, ends))
    kept = [part.at(block.kept) for part in parts]
    joined = kept[0] if len(kept) == 1 else torch.cat(kept)
    if block.trained:
        joined = joined.detach()
    else:
        values.carried = kept
        values.losses += [loss for part in parts for loss in part.losses]
    values.hidden.append(joined)
    values.integers.append(torch.cat([part.integers[-1] for part in parts]))
    values.objects += [part.objects[-1] for part in parts]
    if not block.microbatches and not block.trained:
        values.hidden[-1:-1] = parts[0].hidden
        values.weights += parts[0].weights
    if block.last is not None:
        shown.append(parts[-1].at(block.last))


def _run_lines(block: Block, actors: Sequence[Any], values: Values, ends: bool) -> Values:
    for line in block.lines:
        _LINES[line.what](line, actors, values)
        values.writes[line.actor] += line.what in WRITES
    if ends:
        values.losses.append(actors[0].loss(values.hidden[-1]))
    if block.trained:
        loss = actors[0].loss(values.hidden[-1])
        for other in values.losses:
            loss = loss + other
        cg.backward(loss)
    return values


Runner = Callable[[Line, Sequence[Any], Values], None]
_LINES: dict[str, Runner] = {}


def _line(runner: Runner) -> Runner:
    """Register what a line does, by the name of the function."""
    _LINES[runner.__name__.strip("_")] = runner
    return runner


def _unary(name: str) -> None:
    def run(line: Line, actors: Sequence[Any], values: Values) -> None:
        method = getattr(actors[line.actor], name)
        values.hidden.append(method(values.at(line.first)))

    _LINES[name] = run


for _name in ("linear", "peek", "same", "strided", "half", "accumulate", "average"):
    _unary(_name)


@_line
def _reread(line: Line, actors: Sequence[Any], values: Values) -> None:
    actor, x = actors[line.actor], values.at(line.first)
    before = actor.peek(x)
    actor.accumulate(x)
    values.hidden += [before, actor.peek(x)]


@_line
def _mix(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(actors[line.actor].mix(values.at(line.first), values.at(line.second)))


@_line
def _split(line: Line, actors: Sequence[Any], values: Values) -> None:
    sine, rest = actors[line.actor].split(values.at(line.first))
    assert rest["rows"] == sine.shape[0]
    values.hidden += [sine, rest["cos"], rest["large"] + sine]


@_line
def _join(line: Line, actors: Sequence[Any], values: Values) -> None:
    several = [values.at(line.first), values.at(line.second), values.at(line.first)]
    values.hidden.append(actors[line.actor].join(several))


@_line
def _note(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.objects.append(actors[line.actor].note(values.at(line.first)))


@_line
def _check(line: Line, actors: Sequence[Any], values: Values) -> None:
    note = values.objects[line.second % len(values.objects)]
    values.objects.append(actors[line.actor].check(note, values.at(line.first)))


@_line
def _draft(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(actors[line.actor].draft(values.at(line.first).detach()))


@_line
def _weight(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.read_weight(actors, line.actor)


@_line
def _project(line: Line, actors: Sequence[Any], values: Values) -> None:
    if not values.fresh_weights():
        values.read_weight(actors, line.second % len(actors))
    weights = values.fresh_weights()
    weight = weights[line.second % len(weights)]
    values.hidden.append(actors[line.actor].project(values.at(line.first), weight))


@_line
def _indices(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.integers.append(actors[line.actor].indices(values.at(line.first)))


@_line
def _look(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(actors[line.actor].look(values.integers[-1]))


@_line
def _look_given(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(actors[line.actor].look(indices=values.integers[0]))


@_line
def _add(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append((values.at(line.first) + values.at(line.second)) / 2)


@_line
def _inplace(line: Line, actors: Sequence[Any], values: Values) -> None:
    fresh = values.at(line.first) * 1.0
    fresh += values.at(line.second)
    fresh[:, 0] = 0.0
    values.hidden.append(fresh)


@_line
def _cat(line: Line, actors: Sequence[Any], values: Values) -> None:
    both = torch.cat([values.at(line.first), values.at(line.second)], dim=1)
    values.hidden.append(both[:, 1 : WIDTH + 1])


@_line
def _where(line: Line, actors: Sequence[Any], values: Values) -> None:
    a, b = values.at(line.first), values.at(line.second)
    values.hidden.append(torch.where(a > b, a, b.sin()))


@_line
def _broadcasted(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(values.at(line.first) + values.at(line.second).mean(0, keepdim=True))


@_line
def _index(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(values.at(line.first)[:, [2, 0, 1]])


@_line
def _made(line: Line, actors: Sequence[Any], values: Values) -> None:
    a = values.at(line.first)
    values.hidden.append(a + torch.arange(WIDTH) + torch.ones_like(a))


@_line
def _literal(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.hidden.append(values.at(line.first) * torch.tensor([0.5, 1.0, 2.0]))


@_line
def _all_reduce(line: Line, actors: Sequence[Any], values: Values) -> None:
    given = _spread(line, actors, values)
    op = ("sum", "avg", "max", "prod")[line.second % 4]
    if op != "sum":  # the only one that has a derivative
        given = [value.detach() for value in given]
    values.hidden += cg.all_reduce(given, op=op)[:2]


@_line
def _all_gather(line: Line, actors: Sequence[Any], values: Values) -> None:
    for whole in cg.all_gather(_spread(line, actors, values), dim=1)[-2:]:
        values.hidden.append(whole[:, -WIDTH:])


@_line
def _reduce_scatter(line: Line, actors: Sequence[Any], values: Values) -> None:
    wide = [torch.cat([v] * len(actors), dim=1) for v in _spread(line, actors, values)]
    values.hidden += cg.reduce_scatter(wide, dim=1)[:2]


@_line
def _all_to_all(line: Line, actors: Sequence[Any], values: Values) -> None:
    wide = [torch.cat([v] * len(actors), dim=1) for v in _spread(line, actors, values)]
    values.hidden += [v[:, -WIDTH:] for v in cg.all_to_all(wide, dim=1)[:2]]


@_line
def _broadcast(line: Line, actors: Sequence[Any], values: Values) -> None:
    given = cg.broadcast(values.at(line.first), list(actors))
    values.hidden += [actor.half(value) for actor, value in zip(actors, given, strict=True)][:2]


@_line
def _gather(line: Line, actors: Sequence[Any], values: Values) -> None:
    whole = cg.gather(_spread(line, actors, values), root=actors[line.actor], dim=1)
    values.hidden.append(whole[:, -WIDTH:])


@_line
def _scatter(line: Line, actors: Sequence[Any], values: Values) -> None:
    whole = torch.cat([values.at(line.first)] * len(actors), dim=1)
    given = cg.scatter(actors[line.actor].half(whole), list(actors), dim=1)
    values.hidden += [actor.half(value) for actor, value in zip(actors, given, strict=True)][-2:]


def _spread(line: Line, actors: Sequence[Any], values: Values) -> list[Tensor]:
    """A value of each actor."""
    x = values.at(line.first)
    return [actor.linear(x) for actor in actors]


@_line
def _loss(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.losses.append(actors[line.actor].loss(values.at(line.first)))


@_line
def _mean_square(line: Line, actors: Sequence[Any], values: Values) -> None:
    values.losses.append(values.at(line.first).square().mean())


def without_microbatches(recipe: Recipe) -> Recipe:
    """The same step without any marks for a schedule."""
    return replace(recipe, blocks=tuple(replace(b, microbatches=0) for b in recipe.blocks))


def inputs(execution: int) -> tuple[Tensor, Tensor, Any]:
    """Arguments for an execution."""
    generator = torch.Generator().manual_seed(1000 + execution)
    x = torch.randn((ROWS, WIDTH), generator=generator, dtype=torch.float64)
    return x, torch.arange(ROWS) % 3, ("label", execution)
