"""Draw a timeline as one HTML page without other files, with zoom and tooltips.

The page is `page.html`; the timeline goes into it as JSON.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .model import Picture, TimeSlice, WorkKind
from .style import SHADES, fill_of, ink_on
from .tracks import Band, stack, total

_KINDS = tuple(WorkKind)


def timeline_html(picture: Picture, graph: str = "") -> str:
    """Draw a timeline.

    Args:
        picture: the timeline to draw.
        graph: SVG to show below it.
    """
    data = json.dumps(_data(picture), separators=(",", ":"), ensure_ascii=False)
    return _template().substitute(
        title=escape(picture.title),
        # Whatever the strings hold, they must not end the element that holds them.
        data=data.replace("<", "\\u003c"),
        graph=f'<section id="graph">{graph}</section>' if graph else "",
    )


@cache
def _template() -> Template:
    return Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _data(picture: Picture) -> dict[str, Any]:
    """The data that the page's script reads; each text is in it once."""
    bands = stack(picture)
    strings = _Strings()
    return {
        "title": picture.title,
        "note": picture.note,
        "end": picture.end,
        "height": total(bands),
        "kinds": _kinds(picture),
        "shades": SHADES if picture.has_chunks else "",
        "rows": [_row(band, strings) for band in bands],
        "arrows": [
            [
                arrow.tail.row,
                arrow.tail.track,
                _rounded(arrow.tail.time),
                arrow.head.row,
                arrow.head.track,
                _rounded(arrow.head.time),
            ]
            for arrow in picture.arrows
        ],
        "strings": strings.all,
    }


def _kinds(picture: Picture) -> list[dict[str, Any]]:
    used = set(picture.kinds)
    return [
        {
            "name": kind.value,
            "fills": [fill_of(kind, chunk) for chunk in (0, 1)],
            "ink": ink_on(kind),
            "used": kind in used,
            "quiet": kind is WorkKind.WAIT,
        }
        for kind in _KINDS
    ]


class _Strings:
    """Gives each string a number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.all)
            self.all.append(text)
        return number


def _row(band: Band, strings: _Strings) -> dict[str, Any]:
    return {
        "name": band.row.name,
        "rank": band.row.rank,
        "top": band.top,
        "height": band.height,
        "tracks": [
            {
                "name": lane.track.name,
                "top": lane.top,
                "height": lane.height,
                "slices": [_slice(box, strings) for box in lane.track.slices],
            }
            for lane in band.lanes
        ],
    }


def _slice(box: TimeSlice, strings: _Strings) -> list[Any]:
    return [
        _rounded(box.start),
        _rounded(box.end),
        _KINDS.index(box.kind),
        *map(strings.number, (box.name, box.label, box.op, box.source)),
        box.nbytes,
        box.microbatch,
        box.execution,
        box.chunk % 2,
    ]


def _rounded(ms: float) -> float:
    """Milliseconds, rounded to nanoseconds."""
    return round(ms, 6)
