"""Refuse what a traced call does to random generators outside of its graph.

Nothing draws from torch's default generator while a call is traced, so its state is free to say how
many numbers the graph has drawn. Code that saves that state and puts it back, as a checkpoint does,
then says which draws it repeats.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...error_translation import refusal_here
from ...source import is_torch_file
from ...values.heap.snapshot import GENERATORS, Snapshot
from ...values.interface import TracedCall

_REMEDY = (
    "draw with torch functions (torch.rand, dropout), which a step seeds by itself; where layers "
    "are left out at random, set the chance of that to 0 (layerdrop=0.0); or mark the method with "
    "@cg.opaque"
)
_ONCE = "which would happen once, while tracing, instead of in every execution"
_BETWEEN = frozenset({__file__, torch.random.__file__, contextlib.__file__})


class _WatchedGenerator:
    """Stands for torch's default generator where `torch.manual_seed` and the like look for it."""

    def __init__(self, generator: torch.Generator, shown: str) -> None:
        self._generator = generator
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and not _called_by_torch():
            raise refusal_here(
                self._shown,
                "it seeds or sets torch's global generator (torch.manual_seed or set_rng_state, "
                f"torch.random.fork_rng), {_ONCE}",
                _REMEDY,
            )
        return getattr(self._generator, name)


def _called_by_torch() -> bool:
    """True if the caller is torch itself, as in `torch.utils.checkpoint`."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return is_torch_file(frame.f_code.co_filename)


@contextmanager
def generator_watched(shown: str) -> Iterator[None]:
    """Refuse to seed or set torch's generator inside the `with` block, with the user's line.

    A fork of the generator restores its state, so a comparison of states would not show it.
    """
    names: dict[str, Any] = vars(torch.random)
    generator = names["default_generator"]
    names["default_generator"] = _WatchedGenerator(generator, shown)
    try:
        with draws_bounded(shown):
            yield
    finally:
        names["default_generator"] = generator


class DrawnNumber:
    """Stands for a number that Python's random module draws; its bounds alone are known.

    A comparison with a number outside of the bounds comes out the same in every execution. Any
    other use is refused.
    """

    def __init__(self, low: float, high: float, shown: str) -> None:
        self._low, self._high, self._shown = low, high, shown

    def __lt__(self, other: float) -> bool:
        return self._decided(other > self._high, other <= self._low)

    def __le__(self, other: float) -> bool:
        return self._decided(other >= self._high, other < self._low)

    def __gt__(self, other: float) -> bool:
        return self._decided(other < self._low, other >= self._high)

    def __ge__(self, other: float) -> bool:
        return self._decided(other <= self._low, other > self._high)

    def _decided(self, always: bool, never: bool) -> bool:
        if always or never:
            return always
        raise self._refusal()

    def _refusal(self) -> Exception:
        return refusal_here(
            self._shown, f"it draws from or seeds Python's random module, {_ONCE}", _REMEDY
        )


def _refused(self: DrawnNumber, *_: object) -> Any:
    raise self._refusal()


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (
    *("eq", "ne", "bool", "float", "int", "index", "round", "neg", "abs", "hash", "str", "repr"),
    *("format", *_BINARY, *(f"r{name}" for name in _BINARY)),
):
    setattr(DrawnNumber, f"__{_name}__", _refused)


@contextmanager
def draws_bounded(shown: str) -> Iterator[None]:
    """Have `random.random` and `random.uniform` give bounds inside the `with` block.

    Nothing is drawn. Code that calls them with what it may compare leaves Python's generator as it
    was, as a compiled step does.
    """

    def unit() -> DrawnNumber:
        return DrawnNumber(0.0, math.nextafter(1.0, 0.0), shown)

    def uniform(a: float, b: float) -> DrawnNumber:
        return DrawnNumber(min(a, b), max(a, b), shown)

    names: dict[str, Any] = vars(random)
    drawing: dict[str, Callable[..., Any]] = {"random": unit, "uniform": uniform}
    before = {name: names[name] for name in drawing}
    names.update(drawing)
    try:
        yield
    finally:
        names.update(before)


@contextmanager
def random_state_watched(call: TracedCall) -> Iterator[None]:
    """Refuse a call that draws from, or seeds, a generator outside the graph while it is traced.

    Python's and NumPy's draws would be baked into the graph, and `torch.manual_seed` would act
    once instead of in every execution. All generators get their states back.

    Raises:
        TraceError: on exit, if one of them has moved.
    """
    before = Snapshot(GENERATORS)
    _mark(0)
    marked = Snapshot(GENERATORS)
    moved: list[str] = []
    try:
        yield
        if draws_so_far() is not None:
            _mark(0)
        moved = [change.path for change in marked.changes()]
    finally:
        before.restore()
    if moved:
        raise call.refusal(
            f"it draws from or seeds {' and '.join(moved)}, {_ONCE}",
            _REMEDY,
        )


_MARK_SEED = 0x6367_7472_6163_65
_MOST = 1 << 32
"""No graph draws so often."""


def _mark(draws: int) -> None:
    torch.default_generator.manual_seed(_MARK_SEED + draws)


def draws_so_far() -> int | None:
    """The number of draws before this one; None if someone else has moved the generator."""
    generator = torch.default_generator
    seed = generator.initial_seed()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        untouched = torch.equal(
            generator.get_state(), torch.Generator().manual_seed(seed).get_state()
        )
    return seed - _MARK_SEED if untouched and 0 <= seed - _MARK_SEED < _MOST else None


def count_draw() -> int | None:
    """Count one more draw; return the number of draws before it, as `draws_so_far` does."""
    number = draws_so_far()
    if number is not None:
        _mark(number + 1)
    return number
