"""The generated source of bodies, which all actors with the same graph share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch

from ....ir.location import Location


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """Generated code, which can run for any actor with the same graph.

    Attributes:
        text: the source.
        code: the code of the function in it.
        globals: the globals of the function, by name.
        operators: the operators for which globals stand, by name.
        holders: names of globals that hold tensors, each with the number of a slot of the piece.
        locations: the user's lines, by line of the source.
        settled: for code that compares strides, the code to run from then on. None for other code.
    """

    text: str
    code: CodeType
    globals: dict[str, Any]
    operators: dict[str, torch._ops.OpOverload]
    holders: tuple[tuple[str, int], ...]
    locations: dict[int, Location]
    settled: SettledSources | None = None


class SettledSources:
    """The sources to run when strides have been compared, by the names of results that differ.

    Args:
        write: writes one.

    Attributes:
        known: those that were asked for.
    """

    def __init__(self, write: Callable[[frozenset[str]], GeneratedSource]) -> None:
        self._write = write
        self.known: dict[frozenset[str], GeneratedSource] = {}

    def __call__(self, differing: frozenset[str]) -> GeneratedSource:
        if differing not in self.known:
            self.known[differing] = self._write(differing)
        return self.known[differing]


class SourceStore(Protocol):
    """Has sources that an earlier start has generated."""

    def read(
        self, kind: str, write: Callable[[frozenset[str]], GeneratedSource]
    ) -> GeneratedSource | None:
        """The source of a kind; None if there is none.

        Args:
            kind: `plain` or `adding`.
            write: writes the source to run when strides have been compared.
        """


class BodySources:
    """The sources of the bodies of one graph. Each is written when it is asked for first.

    Args:
        write: writes a source: whether gradients that are products are added by the product
            itself, and the names of results that are laid out; None: all results are compared.
        store: has sources of an earlier start; None: there are none.
    """

    def __init__(
        self,
        write: Callable[[bool, frozenset[str] | None], GeneratedSource],
        store: SourceStore | None = None,
    ) -> None:
        self._write = write
        self._store = store
        self.known: dict[str, GeneratedSource] = {}

    def plain(self) -> GeneratedSource:
        """The source that adds all gradients at its end."""
        return self._of("plain", is_adding=False)

    def adding(self) -> GeneratedSource:
        """The source in which gradients that are products are added by the product itself."""
        return self._of("adding", is_adding=True)

    def _of(self, kind: str, is_adding: bool) -> GeneratedSource:
        if kind not in self.known:
            stored = None
            if self._store is not None:
                stored = self._store.read(kind, lambda names: self._write(is_adding, names))
            self.known[kind] = stored or self._write(is_adding, None)
        return self.known[kind]
