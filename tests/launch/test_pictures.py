"""Timelines as data, as SVG, as a page and as a trace."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cg.ir.ops.module import Module
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.text.parser import parse_module
from cg.launch.pictures.model import (
    Picture,
    RankRow,
    TimeSlice,
    Track,
    WorkKind,
    one_above_the_other,
)
from cg.launch.pictures.perfetto import trace_events
from cg.launch.pictures.program_timeline import picture_in_units, picture_of_programs
from cg.launch.pictures.schedule_timeline import picture_of_schedule
from cg.launch.pictures.style import bytes_text, fill_of, ticks, time_text
from cg.launch.pictures.timeline_html import timeline_html
from cg.launch.pictures.timeline_svg import timeline_svg
from cg.launch.pictures.tracks import stack
from cg.launch.pictures.write import write_picture
from cg.passes import schedules
from cg.passes.schedules import Pipeline
from cg.passes.simulate.program_simulator import simulate_programs
from cg.passes.simulate.schedule_simulator import simulate

SVG = "{http://www.w3.org/2000/svg}"

PAIR = """
module @pair phase=scheduled world=2 {
  function @a.twice(f32[256]) -> (f32[256]) {actor = a, kind = opaque} loc("m.py":7 in twice)
  function @b.save(f32[256]) -> (object) {actor = b, effect = write, kind = opaque}
  channel 0 {ranks = {0..1}}
  program @0(%x: f32[256]) {
    %h = call(%x) {fn = @a.twice, mb = 0, stream = compute, task = 0F0} : f32[256]
    %v = wait(%h) {stream = send} : f32[256]
    %s = send(%v) {chan = 0, mb = 0, peer = 1, seq = 0, stream = send} : future<unit>
      loc("m.py":9 in f)
    wait(%s)
    return()
  }
  program @1() {
    %r = recv() {chan = 0, mb = 0, peer = 0, seq = 0, stream = recv, task = 1F0} : future<f32[256]>
    %v = wait(%r) {stream = compute} : f32[256]
    %b = call(%v) {fn = @b.save, stream = compute} : object
    return()
  }
}
"""


def pair() -> Module:
    return parse_module(PAIR)


def schedule_picture(
    name: str = "zb-h1", ranks: tuple[int, ...] = (0, 1, 2), m: int = 4
) -> Picture:
    order = schedules.by_name(name)(Pipeline(ranks, m))
    found = simulate(order, ranks, m, Costs(2.0, 2.0, 1.0, 0.5))
    return picture_of_schedule(found.timeline, name)


def drawn(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(timeline_svg(picture))


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_schedule_has_a_box_for_each_task_and_an_arrow_for_each_transfer() -> None:
    picture = schedule_picture()
    assert [row.rank for row in picture.rows] == [0, 1, 2]
    names = [each.name for each in picture.slices()]
    assert len(names) == len(set(names)) == 3 * 3 * 4
    assert "1B3: backward of microbatch 3 on stage 1" in names
    assert picture.kinds == (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.WEIGHT)
    assert len(picture.arrows) == 2 * 2 * 4
    for arrow in picture.arrows:
        assert arrow.head.time - arrow.tail.time >= 0.5
        assert abs(arrow.head.row - arrow.tail.row) == 1


def test_stages_of_one_rank_differ_in_shade() -> None:
    picture = schedule_picture("zb-v", (0, 1, 1, 0))
    chunks = {each.name.split(" on ")[1]: each.chunk for each in picture.slices()}
    assert chunks == {"stage 0": 0, "stage 1": 0, "stage 2": 1, "stage 3": 1}
    assert "darker: every other stage" in timeline_svg(picture)
    assert data_of(timeline_html(picture))["shades"]
    assert "darker" not in timeline_svg(schedule_picture())
    assert (
        fill_of(WorkKind.FORWARD, 1) != fill_of(WorkKind.FORWARD, 0) == fill_of(WorkKind.FORWARD, 2)
    )


def test_programs_show_what_computes_and_what_travels() -> None:
    module = pair()
    costs = Costs(functions={"a.twice": 2.0, "b.save": 1.0}, link=Link(0.5))
    picture = picture_of_programs(simulate_programs(module, costs), module)
    assert picture.title == "@pair"
    assert [[track.name for track in row.tracks] for row in picture.rows] == [
        ["compute", "send"],
        ["compute", "recv"],
    ]
    call, sent, saved, received = picture.slices()
    assert (call.name, call.kind, call.source) == (
        "0F0 a.twice",
        WorkKind.FORWARD,
        "m.py:7, in twice",
    )
    assert (call.start, call.end, call.nbytes, call.label) == (0.0, 2.0, 1024, "0")
    assert (sent.name, sent.source, sent.nbytes) == (
        "send to rank 1",
        "m.py:9, in f",
        1024,
    )
    assert (sent.start, sent.end) == (received.start, received.end) == (2.0, 2.5)
    assert saved.start == 2.5
    assert received.op.startswith("%r = recv() {chan = 0")
    (arrow,) = picture.arrows
    assert (arrow.tail.row, arrow.tail.track, arrow.head.row, arrow.head.track) == (0, 1, 1, 1)


def test_without_costs_each_task_and_each_loose_call_take_a_unit() -> None:
    picture = picture_in_units(pair())
    times = [(each.start, each.end) for each in picture.slices()]
    # F alone, and a call outside of tasks; nothing has a backward.
    assert times == [(0.0, 1.0), (1.0, 2.0)]
    assert "on paper" in picture.note


def test_the_predicted_row_stands_above_the_measured_one() -> None:
    predicted = schedule_picture()
    measured = replace(predicted, title="measured", arrows=predicted.arrows[:1])
    both = one_above_the_other(predicted, measured)
    assert [row.name for row in both.rows][:3] == [
        "rank 0 predicted",
        "rank 0 measured",
        "rank 1 predicted",
    ]
    assert len(both.arrows) == len(predicted.arrows) + 1
    for arrow in both.arrows:
        assert both.rows[arrow.tail.row].source == both.rows[arrow.head.row].source
    first = stack(both)
    assert [band.top for band in first] == sorted(band.top for band in first)


def test_svg_draws_each_box_where_it_belongs() -> None:
    picture = schedule_picture()
    root = drawn(picture)
    rows = root.findall(f"{SVG}g[@class='row']")
    assert [row.get("data-rank") for row in rows] == ["0", "1", "2"]
    for row, shown in zip(rows, picture.rows, strict=True):
        boxes = row.findall(f"{SVG}g")
        assert len(boxes) == len(shown.tracks[0].slices)
        edges = [float(box.find(f"{SVG}rect").get("x", "")) for box in boxes]  # type: ignore[union-attr]
        assert edges == sorted(edges)
        labels = [text.text for box in boxes for text in box.findall(f"{SVG}text")]
        assert labels == [each.label for each in shown.tracks[0].slices]
        title = boxes[0].find(f"{SVG}title")
        assert title is not None
        assert title.text == (
            f"{shown.tracks[0].slices[0].name}\n2 ms, from "
            f"{time_text(shown.tracks[0].slices[0].start)}\n{shown.tracks[0].slices[0].op}"
        )
    assert len(root.findall(f"{SVG}path[@class='arrow']")) == len(picture.arrows)
    legend = [text.text for text in root.findall(f"{SVG}text")]
    assert legend[-3:] == ["forward (F)", "backward (B)", "weight gradient (W)"]


def test_text_that_looks_like_markup_is_text() -> None:
    odd = TimeSlice(0.0, 1.0, WorkKind.CALL, "<b>&\"'</script>", label="<&", op="</script><i>")
    picture = Picture("<T&>", (RankRow(0, (Track("compute", (odd,)),)),), "<note>")
    titles = [title.text for title in drawn(picture).iter(f"{SVG}title")]
    assert titles[0] == "<T&>"
    assert titles[1] is not None
    assert titles[1].startswith("<b>&\"'</script>")
    page = timeline_html(picture)
    assert page.count("</script>") == 2
    assert odd.name in data_of(page)["strings"]


def test_an_empty_timeline_can_be_drawn() -> None:
    picture = Picture("nothing", (RankRow(0, ()),))
    assert drawn(picture).get("height")
    assert data_of(timeline_html(picture))["rows"][0]["tracks"] == []
    assert [event["ph"] for event in trace_events(picture)] == ["M", "M"]


def test_a_page_needs_nothing_else() -> None:
    page = timeline_html(schedule_picture())
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    data = data_of(page)
    assert [row["name"] for row in data["rows"]] == ["rank 0", "rank 1", "rank 2"]
    assert sum(len(row["tracks"][0]["slices"]) for row in data["rows"]) == 36
    assert "$" not in page.partition('id="data">')[0]


def test_a_trace_is_in_microseconds_with_a_process_for_each_rank() -> None:
    module = pair()
    costs = Costs(functions={"a.twice": 2.0, "b.save": 1.0}, link=Link(0.5))
    picture = picture_of_programs(simulate_programs(module, costs), module)
    events = list(trace_events(picture))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert names == {(0, 0): "compute", (0, 1): "send", (1, 0): "compute", (1, 1): "recv"}
    (call,) = [event for event in events if event["name"] == "0F0 a.twice"]
    assert (call["ph"], call["ts"], call["dur"], call["cat"]) == ("X", 0.0, 2000.0, "forward")
    assert call["args"]["bytes"] == 1024
    assert call["args"]["source"] == "m.py:7, in twice"
    tail, head = [event for event in events if event["name"] == "message"]
    assert (tail["ph"], head["ph"], head["bp"]) == ("s", "f", "e")
    assert tail["id"] == head["id"]
    for flow in (tail, head):
        enclosing = [
            event
            for event in events
            if event["ph"] == "X"
            and (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]
        ]
        assert len(enclosing) == 1


def test_a_file_is_written_in_the_form_of_its_name(tmp_path: Path) -> None:
    picture = schedule_picture()
    for name in ("new/a.svg", "new/a.html", "new/a.json"):
        write_picture(picture, tmp_path / name)
    ElementTree.parse(tmp_path / "new/a.svg")
    assert (tmp_path / "new/a.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "new/a.json").read_text())["otherData"]["title"] == "zb-h1"
    with pytest.raises(ValueError, match=r"a\.png: a picture is written as \.svg, \.html or"):
        write_picture(picture, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("end", "wanted", "expected"),
    [
        (0.0, 5, [0.0]),
        (10.0, 5, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
        (0.01, 2, [0.0, 0.005, 0.01]),
        (7.0, 10, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
    ],
)
def test_ticks_are_round(end: float, wanted: int, expected: list[float]) -> None:
    assert ticks(end, wanted) == pytest.approx(expected)


def test_numbers_have_units() -> None:
    assert [time_text(t) for t in (0.0, 0.0123, 12.3456, 65432.1)] == [
        "0 ms",
        "12.3 µs",
        "12.35 ms",
        "65.43 s",
    ]
    assert [bytes_text(n) for n in (512, 8192, 3 << 19, 5 << 40)] == [
        "512 B",
        "8 KiB",
        "1.5 MiB",
        "5120 GiB",
    ]
