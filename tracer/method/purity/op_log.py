"""Log the operators that a traced call issues, to compare one run of it with another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ....ir.location import Location
from ...errors import Verbatim
from ...values.heap.snapshot import same_bits
from ...values.specs import static_key


@dataclass(frozen=True, slots=True)
class _NumberTensor:
    """A tensor that was made of Python numbers."""

    value: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumberTensor) and same_bits(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.value.shape)

    def __repr__(self) -> str:
        return repr(self.value.tolist())


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A Python value, by type and digits."""

    key: tuple[Any, ...]

    def __repr__(self) -> str:
        return str(self.key[-1])


class OpLog:
    """The operators of one run, with their arguments and the user's lines.

    Args:
        known: the tensors that the run starts from, in an order that is the same for every run.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._held = list(known)  # so that no other tensor gets the same id
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._held)}
        self._entries: list[tuple[str, Any]] = []
        self._lines: list[Location | None] = []
        self._named: dict[int, tuple[torch.Tensor, Verbatim]] = {}
        self._is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Note no operators inside the `with` block."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Let a tensor stand in entries by a name, and not by when it was seen first."""
        self._named[id(tensor)] = tensor, Verbatim(name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name that a tensor was given; None if it has none."""
        known = self._named.get(id(tensor))
        return None if known is None else known[1]

    def note(self, op: object, args: Any, kwargs: Any, loc: Location | None) -> None:
        """Note an operator that is issued."""
        if self._is_off:
            return
        self._entries.append((str(op), (self._form(args), self._form(kwargs))))
        self._lines.append(loc)

    def note_result(self, path: str, value: Any) -> None:
        """Note a result of the run, by the name `path`."""
        self._entries.append((f"the result {path}", self._form(value)))
        self._lines.append(None)

    def mark(self) -> tuple[int, int]:
        """Return a mark of what has been noted so far."""
        return len(self._entries), len(self._held)

    def note_block(
        self, name: str, taken: Sequence[torch.Tensor], since: tuple[int, int] | None = None
    ) -> None:
        """Note a block as one entry.

        Args:
            name: the name of its class.
            taken: the tensors that it takes.
            since: a mark: the entries since then are the block's, and are dropped.
        """
        if since is not None:
            entries, held = since
            del self._entries[entries:], self._lines[entries:]
            for tensor in self._held[held:]:
                self._numbers.pop(id(tensor), None)
            del self._held[held:]
        if self._is_off:
            return
        self._entries.append((name, self._form(taken)))
        self._lines.append(None)

    def _form(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._form, value))
        if isinstance(value, dict):
            return tuple((key, self._form(item)) for key, item in value.items())
        return _Scalar(static_key(value))

    def _tensor(self, value: torch.Tensor) -> _NumberTensor | Verbatim:
        if type(value) is torch.Tensor:
            return _NumberTensor(value)
        if id(value) in self._named:
            return self._named[id(value)][1]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._held)
            self._held.append(value)
        return Verbatim(f"%{number}")

    def difference(self, other: OpLog) -> tuple[str, Location | None] | None:
        """The first entry in which another run differs, in words, with its line; None if none."""
        pairs = zip(self._entries, other._entries, self._lines, strict=False)
        for entry, other_entry, loc in pairs:
            if entry != other_entry:
                return (
                    f"{_words(entry, other_entry)} at first, and {_words(other_entry, entry)} then",
                    loc,
                )
        common = min(len(self._entries), len(other._entries))
        if len(self._entries) == len(other._entries):
            return None
        longer = max(self, other, key=lambda log: len(log._entries))
        when = "at first only" if longer is self else "the second time only"
        return f"{longer._entries[common][0]} {when}", longer._lines[common]


def _words(entry: tuple[str, Any], other_entry: tuple[str, Any]) -> str:
    """An entry in words; with its arguments, if only these differ."""
    if entry[0] != other_entry[0]:
        return entry[0]
    text = repr(entry[1][0] if entry[0].startswith("aten") else entry[1])
    return f"{entry[0]}{text}" if len(text) < 100 else f"{entry[0]} of other values"
