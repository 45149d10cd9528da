"""Make names that are unique in a program, and read the paths of parameters."""

from __future__ import annotations

from collections.abc import Iterable

from ..types import Type
from .base import DerivedValue, Value
from .module import Program


class Names:
    """Names in use, and a source of fresh ones, each in constant time on average."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = set(used)
        self._last: dict[str, int] = {}

    @staticmethod
    def of(program: Program) -> Names:
        """The names of a program's values."""
        names = Names(value.name for value in program.params)
        names._used.update(value.name for op in program.ops for value in op.results)
        return names

    def fresh(self, base: str) -> str:
        """A name that is not in use yet: `base`, or else `base.1`, `base.2`, ...

        If `base` ends in a number, the number is replaced: `h.1` is followed by `h.2`. So names
        stay short, however many passes derive one from another.
        """
        if base not in self._used:
            self._used.add(base)
            return base
        stem, dot, number = base.rpartition(".")
        if not (dot and stem and number.isdigit()):
            stem = base
        count = self._last.get(stem, 0)
        while True:
            count += 1
            name = f"{stem}.{count}"
            if name not in self._used:
                break
        self._last[stem] = count
        self._used.add(name)
        return name

    def derive(self, source: Value, suffix: str, type_: Type) -> DerivedValue:
        """A new value that is named after another value of the program."""
        return DerivedValue(self.fresh(f"{source.name}.{suffix}"), type_, source, suffix)


def layer_of(path: str) -> str:
    """The layer of a parameter: its path as far as the first number in it.

    The layer of `blocks.3.up.weight` and `blocks.3.norm.bias` is `blocks.3`. A path without numbers
    has the layer "".
    """
    names = path.split(".")
    numbers = [index for index, name in enumerate(names[:-1]) if name.isdecimal()]
    return ".".join(names[: numbers[0] + 1]) if numbers else ""
