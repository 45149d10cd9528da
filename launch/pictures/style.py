"""The style of all pictures: colours, the ticks of an axis, numbers with their units."""

from __future__ import annotations

import math
from html import escape

from .model import WorkKind

COLOURS: dict[WorkKind, str] = {
    WorkKind.FORWARD: "#3d74cc",
    WorkKind.BACKWARD: "#d0692b",
    WorkKind.WEIGHT: "#2f8f5b",
    WorkKind.UPDATE: "#7d53b8",
    WorkKind.CALL: "#3d74cc",
    WorkKind.MESSAGE: "#1b8a9c",
    WorkKind.WAIT: "#e4e7ec",
    WorkKind.OTHER: "#8a94a3",
}
"""Fills; white text can be read on all of them but WAIT."""


def fill_of(kind: WorkKind, chunk: int = 0) -> str:
    """The colour of a slice; every other chunk of a rank is darker."""
    colour = COLOURS[kind]
    if chunk % 2 == 0 or kind is WorkKind.WAIT:
        return colour
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part * 0.68):02x}" for part in parts)


SHADES = "darker: every other stage of a rank"
"""The legend's text for ranks with several stages."""

INK, FAINT, LINE, PAPER, BAND = "#1f2733", "#667085", "#dfe3e9", "#ffffff", "#f6f7f9"
"""Text, lesser text, lines, background, and the background of every other rank."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def svg_head(width: float, height: float, style: str, title: str) -> list[str]:
    """The first lines of a drawing: its size, style sheet, title and background."""
    size = f"{width:.0f}", f"{height:.0f}"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="{FONT}" font-size="11" fill="{INK}">',
        style,
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]


def ink_on(kind: WorkKind) -> str:
    """The colour of text on a slice."""
    return FAINT if kind is WorkKind.WAIT else "#ffffff"


def ticks(end: float, wanted: int = 10) -> list[float]:
    """About `wanted` round times from 0 to `end`, in the same unit."""
    if end <= 0:
        return [0.0]
    raw = end / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [index * step for index in range(math.floor(end / step + 1e-9) + 1)]


def time_text(ms: float) -> str:
    """A time with its unit: `12.3 ms`, `45 µs`, `1.2 s`."""
    if abs(ms) >= 1e4:
        return f"{ms / 1e3:.4g} s"
    if ms == 0 or abs(ms) >= 0.1:
        return f"{ms:.4g} ms"
    return f"{ms * 1e3:.3g} µs"


def bytes_text(count: int) -> str:
    """A size with its unit: `512 B`, `8 KiB`, `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes everything")
