"""Sets that are joined, by union-find."""

from __future__ import annotations

from typing import Generic, TypeVar

Element = TypeVar("Element")


class DisjointSets(Generic[Element]):
    """Elements in disjoint sets; each is alone in its set until it is joined with another."""

    def __init__(self) -> None:
        self._parents: dict[Element, Element] = {}

    def of(self, element: Element) -> Element:
        """The element that represents the set of `element`."""
        parents = self._parents
        root = parents.get(element)
        if root is None:
            return element
        if root not in parents:
            return root
        while (parent := parents.get(root)) is not None:
            root = parent
        while element != root:
            parents[element], element = root, parents[element]
        return root

    def join(self, one: Element, other: Element) -> None:
        """Join the sets of two elements; that of the first is represented by the other's."""
        one, other = self.of(one), self.of(other)
        if one != other:
            self._parents[one] = other
