"""Compare in every execution what a trace relied on: flat lists of identities, compared in C.

If all identities are the same, nothing has changed. If some differ, the values may still be equal,
and the guard looks closer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import repeat
from typing import Any

from ...values.heap.snapshot import MISSING


class FlatValues:
    """Values of all nodes, as lists whose comparison spends its time in C.

    Attributes:
        tensors: holder and key of each tensor, by the number of its node.
        met: nodes and values that are in the lists, as pairs of `id`s.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, list[tuple[Any, Any]]] = {}
        self.met: set[tuple[int, int]] = set()
        self._holders: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._lacking: list[Any] = []
        self._absent: list[str] = []
        self._slotted: list[Any] = []
        self._slots: list[str] = []
        self._contents: list[Any] = []
        self._objects: list[Any] = []
        self._types: list[type] = []
        self._empty: list[Any] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._many: list[tuple[Iterable[Any], list[Any]]] = []
        self._digests: list[tuple[Any, Any, Any]] = []

    def entry(self, holder: Any, key: Any, value: Any) -> None:
        """Expect that `holder[key]` is this very object."""
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(value)

    def absent(self, holder: Any, name: str) -> None:
        """Expect that `holder` has no such key."""
        self._lacking.append(holder)
        self._absent.append(name)

    def slot(self, obj: Any, name: str, value: Any) -> None:
        """Expect that an attribute without a dict is this very object, or `MISSING`."""
        self._slotted.append(obj)
        self._slots.append(name)
        self._contents.append(value)

    def of_type(self, obj: Any, cls: type) -> None:
        """Expect that the object is of this class."""
        self._objects.append(obj)
        self._types.append(cls)

    def size(self, container: Any) -> None:
        """Expect that the container has as many items as now."""
        if not container:
            self._empty.append(container)
        else:
            self._sized.append(container)
            self._sizes.append(len(container))

    def many(self, values: Iterable[Any]) -> None:
        """Expect that `values` gives the very objects that it gives now, and perhaps more."""
        self._many.append((values, list(values)))

    def digest(self, value: Any, make: Any, digest: Any) -> None:
        """Expect that `make(value)` equals `digest`."""
        self._digests.append((value, make, digest))

    def holds(self) -> bool:
        """True if everything is as expected, by identity.

        Raises:
            LookupError: an entry is gone.
            Exception: whatever a value raises that has another type now.
        """
        return (
            not any(self._empty)
            and all(
                map(operator.is_, map(operator.getitem, self._holders, self._keys), self._values)
            )
            and not any(map(operator.contains, self._lacking, self._absent))
            and all(map(operator.is_, map(type, self._objects), self._types))
            and all(map(operator.eq, map(len, self._sized), self._sizes))
            and (not self._slots or self._same_slots())
            and all(all(map(operator.is_, now, values)) for now, values in self._many)
            and all(make(value) == digest for value, make, digest in self._digests)
        )

    def _same_slots(self) -> bool:
        now = map(getattr, self._slotted, self._slots, repeat(MISSING))
        return all(map(operator.is_, now, self._contents))
