"""Draw an actor graph as SVG: a band for each rank, calls from left to right."""

from __future__ import annotations

from collections import Counter
from html import escape

from .actor_graph import ActorGraph, Edge, GraphNode, Key
from .style import BAND, COLOURS, FAINT, INK, LINE, PAPER, svg_head

_WIDTH, _HEIGHT, _MORE = 152, 38, 12
_ACROSS, _DOWN = 96, 16
_PAD, _LABEL, _TOP = 20, 74, 58
_BETWEEN = 26
_CHARACTER = 6.1


def graph_svg(graph: ActorGraph) -> str:
    """Draw an actor graph. Nodes and edges tell about themselves in tooltips."""
    return _GraphDrawing(graph).draw()


class _GraphDrawing:
    """Draws one SVG."""

    def __init__(self, graph: ActorGraph) -> None:
        self._graph = graph
        self._title = f"@{graph.name}"
        self._lines: list[str] = []
        self._at: dict[Key, tuple[float, float]] = {}
        self._bands: dict[int, tuple[float, float]] = {}
        has_layouts = any(node.layout for node in graph.nodes.values())
        self._box = _HEIGHT + _MORE if has_layouts else _HEIGHT
        self._place()

    def _place(self) -> None:
        """Place layers from left to right, and the nodes of a rank and layer below each other."""
        counts: Counter[tuple[int, int]] = Counter()
        rows: dict[Key, int] = {}
        for key, node in self._graph.nodes.items():
            rows[key] = counts[node.rank, node.layer]
            counts[node.rank, node.layer] += 1
        top = float(_TOP)
        for rank in range(self._graph.world):
            deepest = max((n for (r, _), n in counts.items() if r == rank), default=1)
            height = deepest * (self._box + _DOWN) - _DOWN + 2 * _PAD
            self._bands[rank] = (top, height)
            top += height + _BETWEEN
        self._height = top - _BETWEEN + 16
        for key, node in self._graph.nodes.items():
            x = _LABEL + _PAD + node.layer * (_WIDTH + _ACROSS)
            self._at[key] = x, self._bands[node.rank][0] + _PAD + rows[key] * (self._box + _DOWN)
        layers = max((node.layer for node in self._graph.nodes.values()), default=0) + 1
        self._width = _LABEL + 2 * _PAD + layers * (_WIDTH + _ACROSS) - _ACROSS + 16

    def draw(self) -> str:
        add = self._lines.append
        self._lines += svg_head(self._width, self._height, _STYLE, self._title)
        add(f'<text x="16" y="28" font-size="16" font-weight="600">{escape(self._title)}</text>')
        for rank in self._bands:
            self._band(rank)
        for (source, target), edge in self._graph.edges.items():
            self._edge(source, target, edge)
        for key, node in self._graph.nodes.items():
            self._node(key, node)
        for (source, target), edge in self._graph.edges.items():
            if edge.transport:
                self._edge_label(source, target, edge)
        add("</svg>\n")
        return "\n".join(self._lines)

    def _band(self, rank: int) -> None:
        top, height = self._bands[rank]
        self._lines.append(
            f'<g class="cluster" data-rank="{rank}">'
            f'<rect x="8" y="{top:.0f}" width="{self._width - 16}" height="{height:.0f}" rx="8" '
            f'fill="{BAND}" stroke="{LINE}"/>'
            f'<text x="22" y="{top + height / 2 + 4:.1f}" font-weight="600">rank {rank}</text></g>'
        )

    def _node(self, key: Key, node: GraphNode) -> None:
        x, y = self._at[key]
        colour = PAPER if node.kind is None else COLOURS[node.kind]
        ink = INK if node.kind is None else "#ffffff"
        edge = f' stroke="{FAINT}"' if node.kind is None else ""
        times = f" \N{MULTIPLICATION SIGN}{node.count}" if node.count > 1 else ""
        about = [f"{node.title}{times}", node.detail, f"rank {node.rank}", node.layout, node.source]
        middle = x + _WIDTH / 2
        detail = escape(_cut(f"{node.detail}{times}".strip(), _WIDTH - 12))
        height = self._box if node.layout else _HEIGHT
        first = y + (_HEIGHT / 2 - 3 if detail else _HEIGHT / 2 + 4)
        self._lines.append(
            f'<g class="node"><title>{escape(chr(10).join(filter(None, about)))}</title>'
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{height}" '
            f'rx="{19 if node.kind is None else 6}" fill="{colour}"{edge}/>'
            f'<text class="t" x="{middle:.0f}" y="{first:.1f}" fill="{ink}" font-weight="600">'
            f"{escape(_cut(node.title, _WIDTH - 12))}</text>"
            f'<text class="t" x="{middle:.0f}" y="{y + _HEIGHT / 2 + 12:.1f}" fill="{ink}" '
            f'fill-opacity=".85" font-size="10">{detail}</text>{self._layout(node, x, y, ink)}</g>'
        )

    def _layout(self, node: GraphNode, x: float, y: float, ink: str) -> str:
        """The third line of a box: how ranks hold what it gives."""
        if not node.layout:
            return ""
        return (
            f'<text class="t" x="{x + _WIDTH / 2:.0f}" y="{y + _HEIGHT + _MORE - 5:.1f}" '
            f'fill="{ink}" font-size="10">{escape(_cut(node.layout, _WIDTH))}</text>'
        )

    def _ends(self, source: Key, target: Key) -> tuple[float, float, float, float]:
        (x0, y0), (x1, y1) = self._at[source], self._at[target]
        return x0 + _WIDTH, y0 + _HEIGHT / 2, x1, y1 + _HEIGHT / 2

    def _edge(self, source: Key, target: Key, edge: Edge) -> None:
        x0, y0, x1, y1 = self._ends(source, target)
        nodes = self._graph.nodes
        same = nodes[source].rank == nodes[target].rank
        bend = max(34.0, abs(x1 - x0) * 0.45)
        if same and abs(nodes[target].layer - nodes[source].layer) > 1:
            # Past the nodes between the two, not through them.
            low = max(y0, y1) + _HEIGHT / 2 + 11
            path = (
                f"M{x0:.1f} {y0:.1f}C{x0 + 30:.1f} {y0:.1f} {x0 + 6:.1f} {low:.1f} "
                f"{x0 + 44:.1f} {low:.1f}H{x1 - 44:.1f}C{x1 - 6:.1f} {low:.1f} "
                f"{x1 - 30:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            )
        else:
            path = (
                f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} "
                f"{x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            )
        kind = "state" if edge.is_state else "across" if edge.transport else "within"
        content = "state of the actor" if edge.is_state else edge.text
        about = f"{content}\n{edge.transport}" if edge.transport else content
        self._lines.append(
            f'<g class="edge"><title>{escape(about)}</title><path class="{kind}" d="{path}"/>'
            f'<path class="tip {kind}" d="M{x1 - 6:.1f} {y1 - 3.5:.1f}L{x1:.1f} {y1:.1f}'
            f'L{x1 - 6:.1f} {y1 + 3.5:.1f}z"/></g>'
        )

    def _edge_label(self, source: Key, target: Key, edge: Edge) -> None:
        x0, y0, x1, y1 = self._ends(source, target)
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        text, transport = escape(_cut(edge.text, 150)), escape(edge.transport)
        self._lines.append(
            f'<text class="label" x="{x:.1f}" y="{y - 2:.1f}">{text}'
            f'<tspan x="{x:.1f}" dy="11" class="how">{transport}</tspan></text>'
        )


def _cut(text: str, width: float) -> str:
    """The part of a text that there is room for."""
    room = int(width / _CHARACTER)
    return text if len(text) <= room else text[: room - 1] + "…"


_STYLE = f"""<style>
.t{{text-anchor:middle;pointer-events:none}}
.edge path{{fill:none;stroke-width:1.2}}
.edge .within{{stroke:#aab2bf}}
.edge .across{{stroke:#1b8a9c;stroke-width:1.6}}
.edge .state{{stroke:#aab2bf;stroke-dasharray:4 3}}
.edge .tip{{stroke:none}}
.edge .tip.within,.edge .tip.state{{fill:#aab2bf}}
.edge .tip.across{{fill:#1b8a9c}}
.edge:hover path{{stroke-width:2.4}}
.label{{text-anchor:middle;font-size:10px;paint-order:stroke;stroke:{PAPER};stroke-width:3px}}
.how{{fill:#1b8a9c}}
</style>"""
