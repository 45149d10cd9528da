"""A check that ids are in range, where what is computed of them would not notice.

A rank looks up the ids of its own rows of a table that is cut over ranks, and takes zeros for the
others. So no rank would notice an id that is out of range. Nor does `one_hot`, whose trace compares
ids with each class: such an id would be of none. On a host, the check raises. A host does not wait
for its device, so there the check is part of the graph: it leaves a note in memory of the host,
which is read when the next execution begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .operator_library import defined


@dataclass(frozen=True)
class Lookup:
    """A lookup of ids in a dimension.

    Attributes:
        op: the op in words.
        size: the size of the dimension; ids are at least 0, and below it.
        shape: the shape of the rank's piece of the ids.
        first: the indices of the piece's first entry among all ids; empty if its entries lie apart.
    """

    op: str
    size: int
    shape: tuple[int, ...]
    first: tuple[int, ...]

    def describe(self, id_: int, at: int) -> str:
        """The error that an id is out of range; `at` is its index in the flattened piece."""
        place: list[int] = []
        for size in reversed(self.shape):
            at, index = divmod(at, size)
            place.insert(0, index)
        is_apart = len(self.first) < len(place)
        if not is_apart:
            place = [sum(pair) for pair in zip(self.first, place, strict=True)]
        return (
            f"{self.op}: index {id_} at {place}{' of this rank' if is_apart else ''} is out of "
            f"range: the dimension has {self.size} entries, 0 to {self.size - 1}, and the indices "
            f"here have shape {list(self.shape)}; correct the index, or make the dimension larger"
        )


@dataclass
class _Notes:
    """The note of a device: whether there is an error, the id, its index, the lookup's number.

    Attributes:
        there, here: int64 `[4]`, in memory of the device, and of its host.
        lookups: the lookups, by number.
    """

    there: Tensor
    here: Tensor
    lookups: list[Lookup] = field(default_factory=list)


_notes: dict[str, _Notes] = {}
"""By type of device. A process has one device of a type; graphs of all steps share its notes."""


def checked(
    ids: Tensor, size: int, ignored: int | None, op: str, first: Sequence[int] | None = None
) -> Tensor:
    """A copy of ids, after a check that each is at least 0 and below `size`, or is `ignored`.

    Raises:
        IndexError: an id is out of range, and in memory of the host.
    """
    if ids.numel() and not _are_inside(ids, size, ignored):
        outside = ids.clamp(0, size - 1) != ids
        if ignored is not None:
            outside = outside & (ids != ignored)
        start = (0,) * ids.dim() if first is None else tuple(first)
        lookup = Lookup(op, size, tuple(ids.shape), start)
        if ids.device.type != "cpu":  # the host does not wait for the device
            _note(ids, outside, lookup)
        elif outside.any():
            at = int(outside.flatten().nonzero()[0])
            raise IndexError(lookup.describe(int(ids.flatten()[at]), at))
    return ids.clone()


def _are_inside(ids: Tensor, size: int, ignored: int | None) -> bool:
    """True if all ids are known to be in range, as two numbers tell on a host."""
    if ids.device.type != "cpu" or ignored is not None:
        return False
    least, most = torch.aminmax(ids)
    return int(least) >= 0 and int(most) < size


def _note(ids: Tensor, outside: Tensor, lookup: Lookup) -> None:
    """Note the first error on a device, and start its copy to the host, which does not wait."""
    notes = _notes.get(ids.device.type)
    if notes is None:
        there = torch.zeros(4, dtype=torch.int64, device=ids.device)
        here = torch.zeros(4, dtype=torch.int64).pin_memory()
        notes = _notes[ids.device.type] = _Notes(there, here)
    if lookup not in notes.lookups:
        notes.lookups.append(lookup)
    number = notes.lookups.index(lookup)
    is_one, at = outside.flatten().to(torch.uint8).max(0, keepdim=True)
    id_ = ids.flatten().index_select(0, at)
    new = torch.cat([is_one, id_, at, torch.full_like(at, number)])
    torch.where(notes.there[0] != 0, notes.there, new, out=notes.there)
    notes.here.copy_(notes.there, non_blocking=True)


def noted(device: torch.device) -> str | None:
    """The error that executions on a device have noted so far, or None. Does not wait."""
    notes = _notes.get(device.type)
    if notes is None or not int(notes.here[0]):
        return None
    _, id_, at, number = map(int, notes.here.tolist())
    return (
        f"{notes.lookups[number].describe(id_, at)}. The device has noted it in a step that it has "
        "gone through: what that step computed, and whatever was trained on it, is wrong, so go on "
        "from a checkpoint"
    )


def forget(device: torch.device) -> None:
    """Make room for the next note, once an error has been raised."""
    notes = _notes[device.type]
    notes.there.zero_()
    notes.here.copy_(notes.there)


CHECKED_IDS = defined(
    "checked_ids(Tensor ids, int size, int? ignored, str op, int[]? first=None) -> Tensor",
    checked,
    lambda ids, size, ignored, op, first=None: torch.empty_like(ids),
)
"""`checked` as an operator, for graphs; a rank gives the indices of its piece's first entry."""
