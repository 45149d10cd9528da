"""The data model of a timeline, for all sources of times and all forms of drawing."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from ...ir.attributes import Action


class WorkKind(enum.Enum):
    """The kind of work that a slice of time was spent on; the value stands in the legend."""

    FORWARD = "forward (F)"
    BACKWARD = "backward (B)"
    WEIGHT = "weight gradient (W)"
    UPDATE = "optimizer"
    CALL = "call"
    MESSAGE = "message"
    WAIT = "waiting"
    OTHER = "other"


KIND_OF = {
    Action.FORWARD: WorkKind.FORWARD,
    Action.BACKWARD: WorkKind.BACKWARD,
    Action.WEIGHT: WorkKind.WEIGHT,
}
"""The kind as which a task of a schedule is drawn."""

NUDGE = 1e-6
"""Milliseconds that put the end of an arrow inside the slice that ends there."""


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """A box of a timeline.

    Attributes:
        start, end: in milliseconds from the start of the picture.
        kind: of work; gives the colour.
        name: for tooltips and traces: `2F0 stage2.forward`.
        label: the text in the box, if there is room.
        op: the op in the IR's text form, if there is one.
        source: the user's line, `train.py:12, in step`; empty if it is not known.
        nbytes: of tensors that a message carries or a call makes; None where it has no meaning.
        microbatch: which it belongs to, if any.
        execution: of the step, where several are shown.
        chunk: which of the rank's stages it belongs to, where a rank has several; 0 is the first.
        stream: of the rank.
    """

    start: float
    end: float
    kind: WorkKind
    name: str
    label: str = ""
    op: str = ""
    source: str = ""
    nbytes: int | None = None
    microbatch: int | None = None
    execution: int | None = None
    chunk: int = 0
    stream: str = "compute"


@dataclass(frozen=True, slots=True)
class Track:
    """Slices that do not overlap, by start.

    Attributes:
        stream: of the rank.
        lane: tells apart executions that are in flight at the same time on one stream.
    """

    stream: str
    slices: tuple[TimeSlice, ...]
    lane: int = 0

    @property
    def name(self) -> str:
        """The stream, and `lane` if it is not the first."""
        return self.stream if not self.lane else f"{self.stream} {self.lane}"


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank, as one source tells of it.

    Attributes:
        rank: which.
        source: `predicted` or `measured`, where both are shown; else empty.
        tracks: its streams.
    """

    rank: int
    tracks: tuple[Track, ...]
    source: str = ""

    @property
    def name(self) -> str:
        """The label of the row."""
        return f"rank {self.rank}" + (f" {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True)
class Spot:
    """A slice, by the indices of its row and track and when it starts or ends."""

    row: int
    track: int
    time: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow from a send to the end of the wait for its message."""

    tail: Spot
    head: Spot


@dataclass(frozen=True, slots=True)
class Picture:
    """A timeline.

    Attributes:
        title: of the picture.
        note: a remark for the reader, such as the costs that were assumed.
        rows: from top to bottom.
        arrows: messages.
    """

    title: str
    rows: tuple[RankRow, ...]
    note: str = ""
    arrows: tuple[Arrow, ...] = field(default=())

    @property
    def end(self) -> float:
        """The end of the last slice, in milliseconds."""
        return max((box.end for box in self.slices()), default=0.0)

    def slices(self) -> Iterator[TimeSlice]:
        """All slices, from top to bottom."""
        for row in self.rows:
            for track in row.tracks:
                yield from track.slices

    @property
    def kinds(self) -> tuple[WorkKind, ...]:
        """The kinds that occur, in the order of the legend."""
        present = {box.kind for box in self.slices()}
        return tuple(kind for kind in WorkKind if kind in present)

    @property
    def has_chunks(self) -> bool:
        """True if a rank has several stages, which differ in shade."""
        return any(box.chunk for box in self.slices())


class TrackKey(NamedTuple):
    """Names a track: a rank, its stream, and `lane` as in `Track`."""

    rank: int
    stream: str = "compute"
    lane: int = 0


End: TypeAlias = tuple[TrackKey, float]
"""One end of an arrow: a track and a time."""

_STREAMS = ("compute", "send", "recv", "collective", "copy")


def lay_out(
    title: str,
    note: str,
    ranks: Iterable[int],
    slices: Mapping[TrackKey, Sequence[TimeSlice]],
    arrows: Iterable[tuple[End, End]],
) -> Picture:
    """Lay out slices: a row for each rank, and in it a track for each `lane` and stream.

    Arrows whose tracks have no slices are left out.
    """
    rows: list[RankRow] = []
    places: dict[TrackKey, tuple[int, int]] = {}
    for index, rank in enumerate(sorted(ranks)):
        keys = sorted((key for key in slices if key.rank == rank), key=_order) or [TrackKey(rank)]
        places.update({key: (index, at) for at, key in enumerate(keys)})
        tracks = (
            Track(key.stream, tuple(sorted(slices.get(key, ()), key=_times)), key.lane)
            for key in keys
        )
        rows.append(RankRow(rank, tuple(tracks)))
    placed_arrows = (
        Arrow(Spot(*places[tail], start), Spot(*places[head], end))
        for (tail, start), (head, end) in arrows
        if tail in places and head in places
    )
    return Picture(title, tuple(rows), note, tuple(placed_arrows))


def _order(key: TrackKey) -> tuple[int, int, str]:
    known = key.stream in _STREAMS
    return key.lane, _STREAMS.index(key.stream) if known else len(_STREAMS), key.stream


def _times(box: TimeSlice) -> tuple[float, float]:
    return box.start, box.end


def one_above_the_other(predicted: Picture, measured: Picture) -> Picture:
    """For each rank the predicted row, and under it the measured one."""
    rows: list[tuple[int, int, RankRow]] = []
    for order, (name, picture) in enumerate((("predicted", predicted), ("measured", measured))):
        rows += [(row.rank, order, replace(row, source=name)) for row in picture.rows]
    rows.sort(key=lambda entry: entry[:2])
    index = {(rank, order): at for at, (rank, order, _) in enumerate(rows)}
    arrows: list[Arrow] = []
    for order, picture in enumerate((predicted, measured)):
        moved = [index[row.rank, order] for row in picture.rows]
        arrows += [_moved(arrow, moved) for arrow in picture.arrows]
    notes = [
        f"{name}: {picture.end:.4g} ms" + (f" ({picture.note})" if picture.note else "")
        for name, picture in (("predicted", predicted), ("measured", measured))
    ]
    return Picture(
        measured.title, tuple(row for _, _, row in rows), "; ".join(notes), tuple(arrows)
    )


def _moved(arrow: Arrow, rows: list[int]) -> Arrow:
    return Arrow(
        replace(arrow.tail, row=rows[arrow.tail.row]),
        replace(arrow.head, row=rows[arrow.head.row]),
    )
