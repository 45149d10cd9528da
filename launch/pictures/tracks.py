"""Place the rows and tracks of a timeline, from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Picture, RankRow, Track

TALL, SHORT = 26, 13
"""Heights of tracks: of those that compute, and of all others."""
BETWEEN_TRACKS, BETWEEN_SOURCES, BETWEEN_RANKS = 2, 4, 14


@dataclass(frozen=True, slots=True)
class PlacedTrack:
    """A track and its place."""

    track: Track
    top: int
    height: int


@dataclass(frozen=True, slots=True)
class Band:
    """A row and its place, without the space around it."""

    row: RankRow
    top: int
    height: int
    lanes: tuple[PlacedTrack, ...]


def stack(picture: Picture) -> list[Band]:
    """The rows one below the other, from 0 down."""
    bands: list[Band] = []
    top = BETWEEN_RANKS // 2
    for row in picture.rows:
        if bands:
            same = bands[-1].row.rank == row.rank
            top += BETWEEN_SOURCES if same else BETWEEN_RANKS
        first, lanes = top, []
        for track in row.tracks:
            height = TALL if track.stream == "compute" else SHORT
            lanes.append(PlacedTrack(track, top, height))
            top += height + BETWEEN_TRACKS
        top -= BETWEEN_TRACKS if row.tracks else 0
        bands.append(Band(row, first, top - first, tuple(lanes)))
    return bands


def total(bands: list[Band]) -> int:
    """The height of all rows together."""
    return (bands[-1].top + bands[-1].height if bands else 0) + BETWEEN_RANKS // 2
