"""Cut a graph wherever ranks exchange something, into parts that each rank runs by itself.

A part has all ops that can run after the same number of exchanges. Parts of equal structure, such
as those of equal layers, share their graphs.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ....method.node_memory import memory_of
from ....values.operators import is_random
from ...autodiff.subgraphs import has_effect
from ..versions import LayoutTransfer, Propagation, Version
from .late_nodes import LateNodes
from .local_writes import LocalWrites
from .part_order import behind_part_ahead, last_of_buckets
from .rank_graphs import Graphs, Name, build_all, kind, numbered
from .refusals import draws_late
from .writes import StateWrites


@dataclass(frozen=True)
class Part:
    """Ops between two exchanges.

    Attributes:
        nodes: its nodes of the graph that is partitioned.
        inputs: the values that it takes, contiguous.
        outputs: the values that it gives.
        bodies: the graphs of the ranks; parts of the same structure share them.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[Version, ...]
    outputs: tuple[Version, ...]
    bodies: Graphs


@dataclass(frozen=True, eq=False)
class Partition:
    """A graph as parts and transfers.

    Attributes:
        steps: the parts, each with the transfers that follow it.
        inputs: the values that the graph takes.
        outputs: the values that the graph gives; None for an output that is no tensor.
        gathers: transfers that gather stored state, by the index of the first step that needs it.
    """

    steps: tuple[tuple[Part, tuple[LayoutTransfer, ...]], ...]
    inputs: tuple[Version, ...]
    outputs: tuple[Version | None, ...]
    gathers: Mapping[int, tuple[LayoutTransfer, ...]]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part, _ in self.steps)


def partition(
    propagation: Propagation,
    nodes: Collection[fx.Node] | None = None,
    outputs: Sequence[Version | None] | None = None,
    transferred: Collection[Version] = (),
    state: Collection[fx.Node] = (),
    ranks: Collection[int] | None = None,
    stored: Mapping[fx.Node, str] | None = None,
    buckets: Mapping[fx.Node, int] | None = None,
    resting: Mapping[fx.Node, str] | None = None,
) -> Partition:
    """Cut a graph that has layouts.

    Args:
        propagation: the graph.
        nodes: the nodes to partition, such as those of a forward; values of other nodes that they
            read are inputs. None: all nodes.
        outputs: the values that the partition gives; None: the outputs of the graph.
        transferred: versions that a transfer outside of `nodes` makes; these are inputs as well.
        state: placeholders that each part reads where they live; no part hands them on.
        ranks: the ranks whose graphs are made; None: all.
        stored: the layer of each placeholder of state that is gathered for its use. A part begins
            where a layer is used first.
        buckets: the bucket of each gradient, by the node that computes the gradient. A part ends
            behind the last gradient of a bucket, unless the bucket is the last one.
        resting: the layer of each placeholder of state that is fetched from the host for its use,
            and not gathered. A part begins where such a layer is used first, too.

    Raises:
        LayoutError: parts would draw random numbers, or write to state and read it, in another
            order than the graph.
    """
    chosen = propagation.place.ranks if ranks is None else tuple(ranks)
    return _Partitioner(
        *(propagation, nodes, outputs, transferred, state, chosen),
        *(stored or {}, buckets or {}, resting or {}),
    ).all()


def exchanged(
    propagation: Propagation,
    nodes: Collection[fx.Node],
    outputs: Sequence[Version],
    state: Collection[fx.Node],
    stored: Mapping[fx.Node, str],
    resting: Mapping[fx.Node, str],
) -> frozenset[Version]:
    """The versions that ranks exchange because some nodes read them or `outputs` has them.

    Stored state is not among them: it is gathered again wherever it is used.
    """
    cutter = _Partitioner(propagation, nodes, outputs, (), state, (), stored, {}, resting)
    return frozenset(transfer.after for transfer in cutter.exchanges())


class _Partitioner:
    """One partition."""

    def __init__(
        self,
        propagation: Propagation,
        nodes: Collection[fx.Node] | None,
        outputs: Sequence[Version | None] | None,
        transferred: Collection[Version],
        state: Collection[fx.Node],
        ranks: Sequence[int],
        stored: Mapping[fx.Node, str],
        buckets: Mapping[fx.Node, int],
        resting: Mapping[fx.Node, str],
    ) -> None:
        self.propagation = propagation
        self.stored, self.resting = stored, resting
        self.opened: dict[str, int] = {}
        self.held: dict[Version, int] = {}
        self.put_off: dict[Version, int] = {}
        self.transferred = frozenset(transferred)
        self.ranks = ranks
        self.state = frozenset(state)
        chosen = frozenset(propagation.graph.nodes if nodes is None else nodes)
        laid_out = propagation.layouts
        self.nodes = [n for n in propagation.graph.nodes if n in laid_out and n in chosen]
        self.outputs = tuple(propagation.outputs if outputs is None else outputs)
        self.transfers = {
            t.after: t for t in propagation.transfers if t.after not in self.transferred
        }
        self.ops = self._live()
        own = set(self.ops)
        self.level: dict[fx.Node, int] = {}
        self.needed: dict[int, dict[Version, None]] = {}
        drawn: int | None = None
        following, earliest = 0, 0
        ends = last_of_buckets(self.ops, buckets)
        writes = StateWrites(propagation, self.ops, self.state)
        for node in self.ops:
            for version in self.reads(node):
                self._open(version, following)
            levels = [
                self.available(v)
                for v in self.reads(node)
                if v.node in own or v.node in resting or v in self.transfers
            ]
            self.level[node] = max([*levels, writes.earliest(node)])
            self._put_behind(node)
            if node.target is not operator.getitem:  # a getitem stays with its tuple
                self.level[node] = max(self.level[node], earliest)
            if is_random(node.target, node.args, node.kwargs):
                if drawn is not None and self.level[node] > drawn:
                    raise draws_late(node, propagation.locations)
                drawn = self.level[node] = max(self.level[node], drawn or 0)
            following = max(following, self.level[node] + 1)
            writes.note(node, self.level[node])
            if node in ends:
                earliest = following
        self._put_off(writes)
        passing = self.propagation.passing.intersection(self.transfers)
        self.put_off = behind_part_ahead(passing, {n: self.reads(n) for n in self.ops}, self.level)
        writes.move_views(self.level)
        writes.check(self.outputs, (v for t in self.transfers.values() for v in t.takes))
        memories = frozenset(map(memory_of, self.state))
        LocalWrites(propagation, self.level, self.reads, self.transfers, memories).check()

    def _open(self, version: Version, level: int) -> None:
        """Note the level at which a layer is used first: from there on its state is at hand."""
        transfer = self.transfers.get(version)
        if transfer is None:
            if version.node in self.resting:
                self.opened.setdefault(self.resting[version.node], level)
        elif self.is_gather(transfer):
            self.opened.setdefault(self.stored[version.node], level)
        else:
            self._open(transfer.before, level)

    def _put_behind(self, node: fx.Node) -> None:
        """Let a late op begin one part later; its operands travel on behind the part before."""
        answer = self.propagation.answers.get(node)
        if answer is not None and answer.is_late:
            for index in answer.dispatched:
                self.held.setdefault(self.propagation.reads[node][index], self.level[node])
            self.level[node] += 1

    def is_gather(self, transfer: LayoutTransfer) -> bool:
        """True if a transfer gathers stored state from the pieces in which it rests."""
        node = transfer.before.node
        if node not in self.stored or not transfer.change.communicates:
            return False
        return transfer.before not in self.transfers

    def _put_off(self, writes: StateWrites) -> None:
        """Move some ops to the parts that read their results."""
        LateNodes(
            propagation=self.propagation,
            nodes=self.ops,
            parts=self.level,
            results=self.outputs,
            reads=self.reads,
            available=self.available,
            source=self._source,
            ids_of=self._ids_of,
            is_given=self.transferred.__contains__,
            stays=self._is_held_anyway,
            is_held=writes.has,
        ).move()

    def _ids_of(self, version: Version) -> Iterator[Version]:
        """The ids that say which rows travel in the transfers that make a version."""
        transfer = self.transfers.get(version)
        if transfer is not None:
            yield from self._ids_of(transfer.before)
            if transfer.rows is not None:
                yield transfer.rows.ids

    def _live(self) -> list[fx.Node]:
        """The ops that an output needs or that have an effect, and the ops that these need."""
        live = set[fx.Node]()

        def need(version: Version) -> None:
            live.add(version.node)
            live.update(ids.node for ids in self._ids_of(version))

        for version in self.outputs:
            if version is not None:
                need(version)
        answers = self.propagation.answers
        ops = [n for n in self.nodes if n in answers or n.target is operator.getitem]
        for node in reversed(ops):
            if node in live or has_effect(node):
                live.add(node)
                if node.target is operator.getitem:
                    live.update(node.all_input_nodes)
                else:
                    for version in self.propagation.reads[node]:
                        need(version)
        return [node for node in ops if node in live]

    def reads(self, node: fx.Node) -> Iterable[Version]:
        """The versions that a node takes."""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return [Version(source, _NO_LAYOUT)] if source in self.level else []
        return self.propagation.reads[node]

    def available(self, version: Version) -> int:
        """The number of exchanges after which a version can be read."""
        transfer = self.transfers.get(version)
        if transfer is None and version.node in self.resting:
            return self.opened.get(self.resting[version.node], 0)
        if transfer is None:
            return 0 if version in self.transferred else self.level.get(version.node, 0)
        if self.is_gather(transfer):
            return self.opened.get(self.stored[version.node], 0)
        at = max(self.available(transfer.before), self.held.get(transfer.before, 0))
        at = max(at, self.put_off.get(version, 0))
        if transfer.rows is not None:
            at = max(at, self._known(transfer.rows.ids))
        return at + transfer.change.communicates

    def _known(self, ids: Version) -> int:
        """The number of exchanges that come before those of a transfer that takes ids.

        The transfers behind a part stand in order, so one takes what another has just made.
        """
        transfer = self.transfers.get(ids)
        is_made = transfer is not None and transfer.change.communicates
        return self.available(ids) - is_made

    def exchanges(self) -> list[LayoutTransfer]:
        """The transfers in which ranks exchange something, without gathers of stored state."""
        self._demand()
        return [t for t in self._wanted_exchanges() if not self.is_gather(t)]

    def _wanted_exchanges(self) -> list[LayoutTransfer]:
        return [
            t
            for t in self.propagation.transfers
            if t.change.communicates and t.after in self.transfers and t.after in self.wanted
        ]

    def all(self) -> Partition:
        exchanges = self.exchanges()
        after = [self.available(t.after) - 1 for t in exchanges]
        gathers: dict[int, list[LayoutTransfer]] = {}
        for transfer in filter(self.is_gather, self._wanted_exchanges()):
            gathers.setdefault(self.available(transfer.after), []).append(transfer)
        last = max([*self.level.values(), *self.needed, *after, *gathers], default=0)
        graphs: dict[str, Graphs] = {}
        nodes: list[list[fx.Node]] = [[] for _ in range(last + 1)]
        for node in self.ops:
            nodes[self.level[node]].append(node)
        steps = []
        for level in range(last + 1):
            part = self._part(level, nodes[level], graphs)
            follow = [t for t, at in zip(exchanges, after, strict=True) if at == level]
            steps.append((part, tuple(follow)))
        inputs = {v: None for part, _ in steps for v in part.inputs if self._is_given(v)}
        outside = [v for v in (*self.outputs, *self.wanted) if v is not None and self._is_given(v)]
        inputs |= dict.fromkeys(outside)
        step_gathers = {level: tuple(transfers) for level, transfers in gathers.items()}
        return Partition(tuple(steps), tuple(inputs), self.outputs, step_gathers)

    def _is_given(self, version: Version) -> bool:
        """True if a version is an input of the partition; constants and state are none."""
        is_made = version in self.transfers or self._is_computed(version)
        return not is_made and not self._is_at_hand(version.node)

    def _is_computed(self, version: Version) -> bool:
        """True if one of these ops computes a version's value."""
        return version.node in self.level and version not in self.transferred

    def _is_at_hand(self, node: fx.Node) -> bool:
        """True if each part has a value itself: a constant or state."""
        return node.op == "get_attr" or node in self.state

    def _is_held_anyway(self, version: Version) -> bool:
        """True if a rank holds a version for all parts: nothing gathers or fetches it."""
        is_fetched = version in self.transfers or version.node in self.resting
        return not is_fetched and self._is_at_hand(version.node)

    def _demand(self) -> None:
        """Find the values that go from part to part, into transfers, and out."""
        self.wanted: dict[Version, None] = {}
        for node in self.ops:
            if node.target is not operator.getitem:
                for version in self.propagation.reads[node]:
                    self._want(version, self.level[node])
        for output in self.outputs:
            if output is not None:
                self._want(output, None)

    def _want(self, version: Version, level: int | None) -> None:
        """Write down that a version is read in the part of a level, or outside of all (None)."""
        self.wanted[version] = None
        transfer = self.transfers.get(version)
        at = self.available(version)
        if transfer is not None and self.is_gather(transfer):
            if level is None:  # it is an output, or goes into another exchange
                self.needed.setdefault(at, {})[version] = None
            return
        if transfer is not None and transfer.change.communicates:
            for source in transfer.takes:
                self._want(source, None)
            return
        is_const = self._is_at_hand(version.node)
        if transfer is not None:  # a slice: made where it is read; of an output, at once
            self._want(transfer.before, at if level is None else level)
            if level is None:
                self.needed.setdefault(at, {})[version] = None
            return
        is_computed = self._is_computed(version)
        if (is_computed or is_const) and (level is None or (level != at and is_computed)):
            self.needed.setdefault(at, {})[version] = None

    def _part(self, level: int, nodes: Sequence[fx.Node], graphs: dict[str, Graphs]) -> Part:
        outputs = tuple(self.needed.get(level, {}))
        inputs = tuple(self._inputs(level, nodes, outputs))
        names = numbered((*(v.node for v in inputs), *nodes))
        key = self._key(names, inputs, nodes, outputs)
        if key not in graphs:
            graphs[key] = build_all(self.propagation, self.ranks, inputs, nodes, outputs)
        return Part(tuple(nodes), inputs, outputs, graphs[key])

    def _inputs(
        self, level: int, nodes: Sequence[fx.Node], outputs: Iterable[Version]
    ) -> Iterator[Version]:
        """The versions that a part takes from elsewhere, each once."""
        read = [
            version
            for node in nodes
            if node.target is not operator.getitem
            for version in self.propagation.reads[node]
        ]
        seen: set[Version] = set()
        for version in (*read, *outputs):
            source = self._source(version)
            at_level = self._is_computed(source) and self.level[source.node] == level
            local = source not in self.transfers and at_level
            if not local and source.node.op != "get_attr" and source not in seen:
                seen.add(source)
                yield source

    def _source(self, version: Version) -> Version:
        """The version that a slice is taken of, through any number of slices."""
        transfer = self.transfers.get(version)
        while transfer is not None and not transfer.change.communicates:
            version = transfer.before
            transfer = self.transfers.get(version)
        return version

    def _key(
        self,
        names: Mapping[fx.Node, str],
        inputs: Sequence[Version],
        nodes: Sequence[fx.Node],
        outputs: Sequence[Version],
    ) -> str:
        lines = [f"in {self._version(v, names)}" for v in inputs]
        for node in nodes:
            arguments = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda n: Name(names.get(n, n.name))
            )
            layouts = self.propagation.layouts[node]
            reads = [self._version(v, names) for v in self.propagation.reads.get(node, ())]
            lines.append(f"{names[node]} = {node.target}{arguments} {layouts} {reads} {kind(node)}")
        lines += [f"out {self._version(v, names)}" for v in outputs]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _version(self, version: Version, names: Mapping[fx.Node, str]) -> str:
        """A version, and the version that it is a slice of, in words that depend on no name."""
        transfer, name = self.transfers.get(version), names.get(version.node, version.node.name)
        rows = self.propagation.rows_text(version, names)
        text = f"{name} {version.layout} {kind(version.node)}{rows}"
        if transfer is None or transfer.change.communicates:
            return text
        return f"{text} from {self._version(transfer.before, names)}"


_NO_LAYOUT: Any = None
