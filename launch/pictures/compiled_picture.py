"""A compiled step in one picture: its actor graph, and when its programs run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...ir.ops.module import Function, Module
from ...passes.simulate.program_times import ProgramTimes
from .actor_graph import Transport, actor_graph
from .actor_graph_svg import graph_svg
from .model import Picture, one_above_the_other
from .program_timeline import picture_in_units, picture_of_programs
from .timeline_html import timeline_html
from .timeline_svg import timeline_svg

_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')


def timeline_of(
    module: Module, predicted: ProgramTimes | None, measured: ProgramTimes | None
) -> Picture:
    """Make the timeline of given times; without any, each task takes a unit of time."""
    if predicted is None and measured is None:
        return picture_in_units(module)
    if predicted is None or measured is None:
        note = "predicted" if measured is None else "measured"
        times = measured if predicted is None else predicted
        assert times is not None
        return picture_of_programs(times, module, note)
    return one_above_the_other(
        picture_of_programs(predicted, module), picture_of_programs(measured, module)
    )


def write_compiled(
    module: Module,
    timeline: Picture,
    transport: Transport,
    path: Path,
    traced: Mapping[str, Function],
) -> None:
    """Draw the actor graph and the timeline of a scheduled module.

    Args:
        module: to be drawn.
        timeline: of its programs.
        transport: describes the transport of a channel.
        path: ends in `.svg` or `.html`; its folder is made if it does not exist.
        traced: the functions as they were traced, whose types have layouts.

    Raises:
        ValueError: the path ends in something else.
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".html"):
        raise ValueError(f"{path}: a compiled step is drawn as .svg or .html; name it so")
    graph = graph_svg(actor_graph(module, transport, traced))
    if kind == ".html":
        text = timeline_html(timeline, graph)
    else:
        text = _below_each_other([graph, timeline_svg(timeline)], f"@{module.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _below_each_other(parts: list[str], title: str) -> str:
    """Several SVGs in one."""
    width = top = 0.0
    inner = []
    for part in parts:
        match = _SIZE.match(part)
        assert match is not None
        inner.append(part.replace("<svg ", f'<svg y="{top:.0f}" ', 1))
        width, top = max(width, float(match[1])), top + float(match[2])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}" '
    head += f'viewBox="0 0 {width:.0f} {top:.0f}" style="background:#fff">'
    return "\n".join([head, f"<title>{title}</title>", *inner, "</svg>\n"])
