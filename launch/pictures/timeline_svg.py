"""Draw a timeline as SVG that needs no other file, to print it or to show it on a page."""

from __future__ import annotations

from html import escape

from .model import Arrow, Picture, Spot, TimeSlice, WorkKind
from .style import (
    BAND,
    FAINT,
    INK,
    LINE,
    SHADES,
    bytes_text,
    fill_of,
    ink_on,
    svg_head,
    ticks,
    time_text,
)
from .tracks import Band, PlacedTrack, stack, total

_TOP, _BOTTOM, _RIGHT = 76, 40, 24
_NARROWEST, _WIDEST = 900.0, 12000.0
_BOX = 17.0
"""The width of the narrower boxes: a number of two digits fits."""
_INVISIBLE = 0.12
"""Pixels; a box that is narrower is left out."""
_ARROWS = 600
"""The most messages with arrows: more arrows would hide the boxes that they connect."""


def timeline_svg(picture: Picture) -> str:
    """Draw a timeline, so wide that the labels of most boxes fit, within limits.

    Each slice tells about itself in a tooltip. Slices that are too short to be seen are left out.
    """
    return _TimelineDrawing(picture).draw()


def tooltip(time_slice: TimeSlice) -> str:
    """The tooltip of a slice: its name, times, size, source and op, a line each."""
    lines = [
        time_slice.name,
        f"{time_text(time_slice.end - time_slice.start)}, from {time_text(time_slice.start)}",
    ]
    if time_slice.execution is not None:
        lines.append(f"execution {time_slice.execution}")
    if time_slice.nbytes is not None:
        lines.append(bytes_text(time_slice.nbytes))
    lines += [text for text in (time_slice.source, time_slice.op) if text]
    return "\n".join(lines)


class _TimelineDrawing:
    """Draws one SVG."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._bands = stack(picture)
        self._end = picture.end
        self._width = _natural_width(picture)
        self._per_ms = self._width / self._end if self._end else 0.0
        names = [band.row.name for band in self._bands]
        streams = any(len(band.lanes) > 1 for band in self._bands)
        self._label = max((len(name) for name in names), default=0) * 7 + 22
        self._left = self._label + (66 if streams else 0)
        self._lines: list[str] = []

    def draw(self) -> str:
        height = _TOP + total(self._bands) + _BOTTOM
        full = self._left + self._width + _RIGHT
        self._lines += svg_head(full, height, _STYLE, self._picture.title)
        self._head()
        for band in self._bands:
            self._shade(band)
        self._axis(total(self._bands))
        if len(self._picture.arrows) <= _ARROWS:
            for arrow in self._picture.arrows:
                self._arrow(arrow)
        for band in self._bands:
            self._band(band)
        self._legend(height - 16)
        self._lines.append("</svg>\n")
        return "\n".join(self._lines)

    def _head(self) -> None:
        title, note = escape(self._picture.title), escape(self._picture.note)
        self._lines.append(f'<text x="16" y="26" font-size="16" font-weight="600">{title}</text>')
        if note:
            self._lines.append(f'<text x="16" y="44" fill="{FAINT}">{note}</text>')

    def _axis(self, height: int) -> None:
        add = self._lines.append
        bottom = _TOP + height
        for time in ticks(self._end, max(4, round(self._width / 110))):
            x = self._x(time)
            add(f'<path class="tick" d="M{x:.1f} {_TOP - 6}V{bottom}"/>')
            label = "0" if time == 0 else f"{time:.6g}"
            add(f'<text class="axis" x="{x:.1f}" y="{_TOP - 10}">{label}</text>')
        add(f'<text x="{self._left - 8}" y="{_TOP - 10}" class="name">ms</text>')

    def _shade(self, band: Band) -> None:
        if band.row.rank % 2 == 0:
            self._lines.append(
                f'<rect fill="{BAND}" x="{self._left}" y="{_TOP + band.top - 3}" '
                f'width="{self._width:.1f}" height="{band.height + 6}"/>'
            )

    def _band(self, band: Band) -> None:
        add = self._lines.append
        top = _TOP + band.top
        add(f'<g class="row" data-rank="{band.row.rank}" data-source="{escape(band.row.source)}">')
        name = escape(band.row.name)
        first = band.lanes[0].height if band.lanes else band.height
        add(f'<text x="16" y="{top + first / 2 + 4:.1f}" font-weight="600">{name}</text>')
        for lane in band.lanes:
            self._lane(lane, len(band.lanes) > 1)
        add("</g>")

    def _lane(self, lane: PlacedTrack, is_named: bool) -> None:
        top = _TOP + lane.top
        if is_named:
            self._lines.append(
                f'<text class="name" x="{self._left - 8}" y="{top + lane.height / 2 + 3.5:.1f}">'
                f"{escape(lane.track.name)}</text>"
            )
        for box in lane.track.slices:
            self._slice(box, top, lane.height)

    def _slice(self, box: TimeSlice, top: int, height: int) -> None:
        x, width = self._x(box.start), (box.end - box.start) * self._per_ms
        if width < _INVISIBLE:
            return
        # A hair of paper between neighbours, where they can spare it.
        visible_width = width - 0.8 if width > 4 else width
        self._lines.append(
            f'<g class="{_class(box.kind, box.chunk)}"><title>{escape(tooltip(box))}</title>'
            f'<rect x="{x:.2f}" y="{top}" width="{visible_width:.2f}" height="{height}" '
            f'rx="{min(2.5, visible_width / 4):.1f}"/>'
            + self._text(box, x + visible_width / 2, top, height, visible_width)
            + "</g>"
        )

    def _text(self, box: TimeSlice, middle: float, top: int, height: int, width: float) -> str:
        size = 11 if height > 16 else 9
        room = int((width - 3) / (size * 0.58))
        if room < 1 or not box.label or box.kind is WorkKind.WAIT:
            return ""
        label = box.label if len(box.label) <= room else ""
        if not label and room >= 4:
            label = box.label[: room - 1] + "…"
        if not label:
            return ""
        y = top + height / 2 + size * 0.36
        at = f'x="{middle:.1f}" y="{y:.1f}" font-size="{size}"'
        return f'<text class="in" {at}>{escape(label)}</text>'

    def _arrow(self, arrow: Arrow) -> None:
        """Draw an arrow from edge to edge, under the slices."""
        x0, x1 = self._x(arrow.tail.time), self._x(arrow.head.time)
        tail, head = self._lane_of(arrow.tail), self._lane_of(arrow.head)
        down = head.top > tail.top
        y0 = _TOP + tail.top + (tail.height if down else 0)
        y1 = _TOP + head.top + (0 if down else head.height)
        bend = (y1 - y0) * 0.6
        self._lines.append(
            f'<path class="arrow" d="M{x0:.1f} {y0}C{x0:.1f} {y0 + bend:.1f} '
            f'{x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1}"/>'
        )

    def _legend(self, y: int) -> None:
        x = 16.0
        for kind in self._picture.kinds:
            self._lines.append(
                f'<g class="{_class(kind)}"><rect x="{x:.0f}" y="{y - 9}" width="11" height="11" '
                f'rx="2.5"/></g><text x="{x + 16:.0f}" y="{y}" fill="{FAINT}">{kind.value}</text>'
            )
            x += 16 + len(kind.value) * 6.1 + 18
        if self._picture.has_chunks:
            self._lines.append(f'<text x="{x:.0f}" y="{y}" fill="{FAINT}">{SHADES}</text>')

    def _x(self, time: float) -> float:
        return self._left + time * self._per_ms

    def _lane_of(self, spot: Spot) -> PlacedTrack:
        return self._bands[spot.row].lanes[spot.track]


def _natural_width(picture: Picture) -> float:
    """The width at which three of four boxes with a label have room for it."""
    times = sorted(
        box.end - box.start
        for box in picture.slices()
        if box.label and box.kind is not WorkKind.MESSAGE and box.end > box.start
    )
    if not times or not picture.end:
        return _NARROWEST
    natural = _BOX * picture.end / times[len(times) // 4]
    return min(max(natural, _NARROWEST), _WIDEST)


def _class(kind: WorkKind, chunk: int = 0) -> str:
    return kind.name.lower() + ("-odd" if chunk % 2 else "")


_FILLS = "\n".join(
    f".{_class(kind, chunk)} rect{{fill:{fill_of(kind, chunk)}}}"
    f".{_class(kind, chunk)} .in{{fill:{ink_on(kind)}}}"
    for kind in WorkKind
    for chunk in (0, 1)
)
_STYLE = f"""<style>
{_FILLS}
.in{{text-anchor:middle;pointer-events:none}}
.axis{{text-anchor:middle;fill:{FAINT}}}
.name{{text-anchor:end;fill:{FAINT};font-size:10px}}
.tick{{stroke:{LINE};stroke-width:1}}
.arrow{{fill:none;stroke:{INK};stroke-width:.9;stroke-opacity:.35}}
.row g:hover rect{{fill-opacity:.8}}
</style>"""
