"""Horizontal bars as SVG, with each value written beside its bar; readable on light and on dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL, _RIGHT, _MARGIN = 760, 210, 70, 16
_BAR, _GAP, _APART = 16, 2, 14
_HEAD, _LEGEND = 62, 24
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
_CHARACTER = 6.6
"""Pixels of a character of the legend, about."""

COLOURS = {
    "blue": ("#2a78d6", "#3987e5"),
    "green": ("#1baf7a", "#199e70"),
    "grey": ("#898781", "#898781"),
    "orange": ("#eb6834", "#d95926"),
}
"""The colours of bars: on light, on dark."""

_SURFACES = {"paper": ("#fcfcfb", "#1a1a19"), "ink": ("#0b0b0b", "#ffffff")}
_TEXTS = {"faint": ("#52514e", "#c3c2b7")}


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        value: its length, in the unit of the picture; not negative.
        colour: a name of `COLOURS`.
        text: what is written beside it.
    """

    value: float
    colour: str
    text: str


@dataclass(frozen=True)
class Group:
    """Bars under one label; one without bars is a heading."""

    label: str
    bars: tuple[Bar, ...] = ()


def draw(title: str, note: str, groups: Sequence[Group], legend: Sequence[tuple[str, str]]) -> str:
    """The picture as text.

    Each heading begins a scale of its own: the longest bar below it has the full width.

    Args:
        title: what is measured, and the unit.
        note: a line below it.
        groups: from top to bottom.
        legend: colours with what they stand for, in the order of the bars.
    """
    top = float(_HEAD + (_LEGEND if legend else 0))
    lines = [_text(_MARGIN, 26, title, "title"), _text(_MARGIN, 46, note, "faint")]
    left = float(_MARGIN)
    for colour, meaning in legend:
        lines.append(_rect(left, _HEAD, 12, 12, colour))
        lines.append(_text(left + 18, _HEAD + 10, meaning, "ink"))
        left += 18 + _CHARACTER * len(meaning) + 20
    top += 6
    for group, longest in zip(groups, _scales(groups), strict=True):
        if not group.bars:
            lines.append(_text(_MARGIN, top + 13, group.label, "title"))
            top += 26
            continue
        height = len(group.bars) * (_BAR + _GAP) - _GAP
        lines.append(_text(_LABEL - 10, top + height / 2 + 4, group.label, "ink end"))
        for bar in group.bars:
            length = bar.value / longest * (_WIDTH - _LABEL - _RIGHT)
            lines.append(_rect(_LABEL, top, length, _BAR, bar.colour))
            lines.append(_text(_LABEL + length + 6, top + 12, bar.text, "faint"))
            top += _BAR + _GAP
        top += _APART - _GAP
    return "\n".join([*_opening(title, top + _MARGIN - _APART), *lines, "</svg>\n"])


def _scales(groups: Sequence[Group]) -> list[float]:
    """For each group the longest bar between the headings around it."""
    scales: list[float] = []
    first = 0
    for index in range(1, len(groups) + 1):
        if index == len(groups) or not groups[index].bars:
            part = groups[first:index]
            longest = max((bar.value for group in part for bar in group.bars), default=0.0)
            scales += [longest or 1.0] * len(part)
            first = index
    return scales


def _opening(title: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}" font-family="{_FONT}" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>",
        ".title { font-weight: 600; font-size: 14px } .end { text-anchor: end }",
        _rules(0),
        f"@media (prefers-color-scheme: dark) {{ {_rules(1)} }}",
        "</style>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]


def _rules(theme: int) -> str:
    fills = {name: both[theme] for name, both in (COLOURS | _SURFACES | _TEXTS).items()}
    fills["title"] = fills["ink"]
    return " ".join(f".{name} {{ fill: {fill} }}" for name, fill in fills.items())


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    if colour not in COLOURS:
        raise KeyError(f"no colour {colour}; there are {', '.join(COLOURS)}")
    return (
        f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height}" rx="2"/>'
    )
