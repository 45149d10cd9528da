"""The actor graph: calls, what flows between them, how it travels; and the picture of it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify
from cg.launch.api.compiled import Compiled
from cg.launch.pictures.actor_graph import ActorGraph, actor_graph
from cg.launch.pictures.actor_graph_svg import graph_svg
from cg.launch.pictures.model import WorkKind
from cg.launch.world.world import use_world

from ..stages import TrainedStage
from ..worlds import virtual_world

SVG = "{http://www.w3.org/2000/svg}"


@cg.actor
class Speaker:
    def say(self, *words: Any) -> Any:
        return " ".join(words)


world = virtual_world(2)


def training() -> Compiled:
    stages = [TrainedStage.on(rank)(rank) for rank in range(2)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for mx in cg.microbatches(x, 3):
            losses.append(stages[1].forward(stages[0].forward(mx)).mean())
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return step.lower(torch.zeros(6, 4)).compile()


def speaking() -> Compiled:
    speakers = [Speaker.on(0)(), Speaker.on(1)()]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def talk(x: Any) -> Any:
        both = [speaker.say(x) for speaker in speakers]
        return speakers[0].say(*both)

    return talk.lower(cg.object).compile(max_inflight=1)


def graph_of(module: Module) -> ActorGraph:
    return actor_graph(module, lambda channel: f"channel {channel.ranks}")


def flows(graph: ActorGraph) -> set[tuple[str, str, str, str]]:
    """Edges as (from, to, type, transport)."""
    names = {key: f"{node.detail or node.rank} {node.title}" for key, node in graph.nodes.items()}
    return {
        (names[source], names[target], "state" if edge.is_state else edge.text, edge.transport)
        for (source, target), edge in graph.edges.items()
    }


def test_a_graph_of_objects() -> None:
    with speaking() as compiled:
        graph = graph_of(compiled.module)
    first, second = sorted({n.detail for n in graph.nodes.values() if n.kind is WorkKind.CALL})
    assert flows(graph) == {
        ("input x", f"{first} say", "object", ""),
        ("input x", f"{second} say", "object", "channel (0, 1)"),
        (f"{first} say", f"{first} say.1", "object", ""),
        (f"{second} say", f"{first} say.1", "object", "channel (1, 0)"),
        (f"{first} say.1", "0 return", "object", ""),
    }
    assert sorted(node.layer for node in graph.nodes.values()) == [0, 1, 1, 2, 3]


def test_microbatches_are_one_and_backwards_have_names() -> None:
    graph = graph_of(training().module)
    boxes = {
        (node.rank, node.title, node.count)
        for node in graph.nodes.values()
        if node.kind in (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.UPDATE)
    }
    assert boxes == {
        (rank, title, count)
        for rank in (0, 1)
        for title, count in (("forward", 3), ("backward of forward", 3), ("update", 1))
    }
    across = {edge.text for edge in graph.edges.values() if edge.transport}
    assert across == {"f32[2,4]", "f32[]"}
    states = [edge for edge in graph.edges.values() if edge.is_state]
    assert len(states) == 2
    for (source, target), _ in graph.edges.items():
        assert graph.nodes[source].layer < graph.nodes[target].layer


LAID_OUT = """module @step phase=scheduled world=2 {
  function @a.up() -> (f32[2]) {actor = a, effect = write, ranks = {0..1}}
  function @b.take(f32[4]) -> (unit) {actor = b, effect = write}
  channel 0 {ranks = {1,0}}
  program @0() {
    %h = call() {fn = @a.up} : f32[2]
    %r = recv() {chan = 0, peer = 1, seq = 0} : future<f32[2]>
    %v = wait(%r) : f32[2]
    %y = assemble(%h, %v) {regions = {[0:2], [2:4]}} : f32[4]
    %u = call(%y) {fn = @b.take} : unit
    return()
  }
  program @1() {
    %h = call() {fn = @a.up} : f32[2]
    %p = slice(%h) {region = [0:2]} : f32[2]
    %s = send(%p) {chan = 0, peer = 0, seq = 0} : future<unit>
    wait(%s)
    return()
  }
}
"""


def test_what_is_assembled_comes_from_all_its_parts() -> None:
    module = parse_module(LAID_OUT)
    verify(module)
    assert flows(graph_of(module)) == {
        ("a up", "b take", "f32[4]", ""),
        ("a up", "b take", "f32[4]", "channel (1, 0)"),
    }


def test_the_picture_has_a_band_for_each_rank_and_a_box_for_each_call() -> None:
    graph = graph_of(training().module)
    root = ElementTree.fromstring(graph_svg(graph))
    clusters = root.findall(f"{SVG}g[@class='cluster']")
    assert [cluster.get("data-rank") for cluster in clusters] == ["0", "1"]
    boxes = root.findall(f"{SVG}g[@class='node']")
    assert len(boxes) == len(graph.nodes)
    assert len(root.findall(f"{SVG}g[@class='edge']")) == len(graph.edges)
    tooltips = [box.findtext(f"{SVG}title") or "" for box in boxes]
    assert any(Path(__file__).name in tooltip for tooltip in tooltips)
    bands = [cluster.find(f"{SVG}rect") for cluster in clusters]
    for box, node in zip(boxes, graph.nodes.values(), strict=True):
        inner, band = box.find(f"{SVG}rect"), bands[node.rank]
        assert inner is not None
        assert band is not None
        top = float(band.get("y", ""))
        assert top < float(inner.get("y", "")) < top + float(band.get("height", ""))


def test_visualize_writes_graph_and_timeline(tmp_path: Path) -> None:
    compiled = training()
    compiled.visualize(tmp_path / "both" / "step.svg")
    root = ElementTree.parse(tmp_path / "both" / "step.svg").getroot()
    parts = root.findall(f"{SVG}svg")
    assert len(parts) == 2
    assert float(parts[1].get("y", "")) == float(parts[0].get("height", ""))
    text = (tmp_path / "both" / "step.svg").read_text()
    assert "in one process" in text
    assert "on paper" in text
    compiled.visualize(tmp_path / "step.html", predicted=compiled.simulate())
    page = (tmp_path / "step.html").read_text()
    assert "<canvas" in page
    assert 'class="cluster"' in page
    assert '"note":"predicted"' in page
    with pytest.raises(ValueError, match=r"step\.pdf: a compiled step is drawn as"):
        compiled.visualize(tmp_path / "step.pdf")


def test_predicted_stands_above_measured(tmp_path: Path) -> None:
    compiled = training()
    (measured,) = compiled.record(torch.zeros(6, 4))
    compiled.visualize(tmp_path / "a.html", predicted=compiled.simulate(), measured=measured)
    page = (tmp_path / "a.html").read_text()
    assert page.index("rank 0 predicted") < page.index("rank 0 measured")


def test_dumps_have_timelines(tmp_path: Path) -> None:
    speakers = [Speaker.on(0)(), Speaker.on(1)()]

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def talk(x: Any) -> Any:
        return speakers[1].say(speakers[0].say(x))

    with talk.lower(cg.object).compile(dump=tmp_path):
        ElementTree.parse(tmp_path / "talk.timeline.svg")
        assert "@talk" in (tmp_path / "talk.timeline.html").read_text()


def test_dumps_of_steps_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Neither do two compilations of one step; another directory begins anew."""
    speaker = Speaker.on(0)()

    def make() -> Any:
        @cg.trace
        def step(x: Any) -> Any:
            return speaker.say(x)

        return step.lower(cg.object)

    first, second = make(), make()
    for folder in (tmp_path / "a", tmp_path / "b"):
        for lowered in (first, second, first):
            lowered.compile(dump=folder).close()
        names = sorted(path.name for path in folder.glob("*.passes.txt"))
        assert names == ["step-2.passes.txt", "step-3.passes.txt", "step.passes.txt"]


GROUP = {
    "forward(x)|loss(h)": cg.cut(0, "dp"),
    "up.*": cg.cut(0, "tp"),
    "down.weight": cg.cut(1, "tp"),
}


@cg.actor
class Wide(torch.nn.Module):
    """Two layers, for a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())

    def loss(self, h: torch.Tensor) -> torch.Tensor:
        return h.square().mean()


def test_the_picture_of_groups_shows_layouts_and_collectives(tmp_path: Path) -> None:
    with use_world(VirtualWorld(4)):
        actor = Wide.on(cg.mesh(dp=2, tp=2), plan=GROUP)()  # type: ignore[attr-defined]

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = actor.loss(actor.forward(x))
            cg.backward(loss)
            return loss

        compiled = step.lower(torch.ones(6, 4)).compile()
        compiled.visualize(tmp_path / "groups.svg")
    text = (tmp_path / "groups.svg").read_text()
    root = ElementTree.fromstring(text).findall(f"{SVG}svg")[0]
    boxes = [
        [each.text for each in box.findall(f"{SVG}text")]
        for box in root.findall(f"{SVG}g[@class='node']")
    ]
    shown = {title: layout for title, _, *layouts in boxes for layout in layouts}
    assert str(shown["forward 1"]).startswith("f32[6/dp,4|+tp]"), shown
    sums = {layout for title, _, *layouts in boxes for layout in layouts if title == "all_reduce"}
    assert "f32[3,4]" in sums
    ranks = {detail for title, detail, *_ in boxes if title == "all_reduce"}
    assert {"ranks {0..1}", "ranks {2..3}"} <= ranks
    tips = [edge.findtext(f"{SVG}title") or "" for edge in root.findall(f"{SVG}g[@class='edge']")]
    assert any("f32[6/dp,4|+tp]" in tip for tip in tips)
