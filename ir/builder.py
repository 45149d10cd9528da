"""Append ops to a program, with names that stay unique."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from .location import Location
from .module import Program
from .ops import Op, Value
from .types import Type

O = TypeVar("O", bound=Op)  # noqa: E741 - the type of op that is being made


class Names:
    """Names in use, and new ones beside them; each costs constant time on average."""

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
        """A name not in use yet: `base`, or else `base.1`, `base.2`, ...

        A number that `base` already ends in is replaced: `h.1` is followed by `h.2`, so that
        names stay short however many passes derive one from another.
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


class Builder:
    """Appends to `program`; `loc` and `mb` are what new ops get unless told otherwise."""

    def __init__(
        self, program: Program, *, loc: Location | None = None, mb: int | None = None
    ) -> None:
        self.program = program
        self.loc = loc
        self.mb = mb
        self.names = Names.of(program)

    def fresh(self, base: str) -> str:
        """A name that no value of the program has: `base`, or `base` with a number."""
        return self.names.fresh(base)

    def value(self, base: str, type_: Type) -> Value:
        """A new value that no op makes yet."""
        return Value(self.names.fresh(base), type_)

    def param(self, base: str, type_: Type) -> Value:
        """A new parameter of the program."""
        value = self.value(base, type_)
        self.program.params.append(value)
        return value

    def emit(
        self,
        cls: type[O],
        operands: Sequence[Value] = (),
        types: Sequence[Type] = (),
        *,
        base: str = "v",
        **attributes: Any,
    ) -> O:
        """Append an op of class `cls` with one new result for each of `types`.

        `base` is what the results' names derive from; `attributes` are the fields of `cls`.
        """
        results = tuple(self.value(base, type_) for type_ in types)
        attributes.setdefault("loc", self.loc)
        attributes.setdefault("mb", self.mb)
        op = cls(tuple(operands), results, **attributes)
        self.program.ops.append(op)
        return op

    @contextmanager
    def defaults(self, *, loc: Location | None = None, mb: int | None = None) -> Iterator[None]:
        """Inside the `with` block, give new ops these defaults; None keeps the one in force."""
        before = self.loc, self.mb
        self.loc = loc if loc is not None else self.loc
        self.mb = mb if mb is not None else self.mb
        try:
            yield
        finally:
            self.loc, self.mb = before
