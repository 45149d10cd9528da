"""Write timelines as Chrome trace JSON, which Perfetto and chrome://tracing read.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
A rank is a process, a stream a thread; times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .model import Picture, RankRow, Spot, TimeSlice

_COLOURS = {
    "FORWARD": "thread_state_running",
    "BACKWARD": "thread_state_runnable",
    "WEIGHT": "good",
    "UPDATE": "rail_animation",
    "WAIT": "grey",
}
"""Names of the format's reserved colours; viewers that do not know them choose their own."""


def write_trace(picture: Picture, path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a timeline to a file, an event a line.

    Args:
        picture: the timeline to write.
        path: its folder is made if it does not exist.
        about: goes into the file's metadata; JSON.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms",\n"otherData": ')
        json.dump({"title": picture.title, "note": picture.note, **(about or {})}, file)
        file.write(',\n"traceEvents": [\n')
        separator = ""
        for event in trace_events(picture):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def trace_events(picture: Picture) -> Iterator[dict[str, Any]]:
    """The events of a timeline, in the format's terms."""
    for index, row in enumerate(picture.rows):
        yield from _names(index, row)
    for index, row in enumerate(picture.rows):
        for thread, track in enumerate(row.tracks):
            for box in track.slices:
                yield _complete(box, index, thread)
    for number, arrow in enumerate(picture.arrows):
        yield _flow("s", number, arrow.tail)
        # It binds to the slice that encloses its time: that of the wait, not the one after it.
        yield {**_flow("f", number, arrow.head), "bp": "e"}


def _names(process: int, row: RankRow) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, {"name": row.name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for thread, track in enumerate(row.tracks):
        yield _metadata("thread_name", process, thread, {"name": track.name})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _complete(box: TimeSlice, process: int, thread: int) -> dict[str, Any]:
    details = {
        "op": box.op,
        "source": box.source,
        "bytes": box.nbytes,
        "microbatch": box.microbatch,
        "execution": box.execution,
    }
    event: dict[str, Any] = {
        "ph": "X",
        "name": box.name,
        "cat": box.kind.name.lower(),
        "ts": _micros(box.start),
        "dur": round(_micros(box.end) - _micros(box.start), 3),
        "pid": process,
        "tid": thread,
        "args": {key: value for key, value in details.items() if value not in (None, "")},
    }
    colour = _COLOURS.get(box.kind.name)
    return event | {"cname": colour} if colour else event


def _flow(phase: str, number: int, spot: Spot) -> dict[str, Any]:
    return {
        "ph": phase,
        "id": number,
        "name": "message",
        "cat": "message",
        "ts": _micros(spot.time),
        "pid": spot.row,
        "tid": spot.track,
    }


def _micros(ms: float) -> float:
    return round(ms * 1e3, 3)
