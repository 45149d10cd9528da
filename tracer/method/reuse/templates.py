"""Copy the operators of a block, forward and backward, into a graph that make_fx is making."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes

from ....ir.location import Location
from ...values.operators import OperatorFunction, storage_key, writes_in_secret, written_values
from ..purity.copy_node import copy_node
from ..purity.dispatch_modes import OpRecorder, nodes_so_far


class BlocksMisled(BaseException):
    """A trace with blocks would differ from one without: the call must be traced without blocks.

    Not an `Exception`, so that no handler in the user's code takes it for a failure.
    """


@dataclass(frozen=True, eq=False)
class First:
    """The trace of a block.

    Attributes:
        nodes: its operators.
        taken: the tensors that it has taken.
        sources: their nodes ahead of the block; an operator that writes to a tensor becomes its
            node.
        left: their nodes behind the block.
        returned: its results.
        results: the nodes of these.
    """

    nodes: Sequence[fx.Node]
    taken: Sequence[torch.Tensor]
    sources: Sequence[fx.Node]
    left: Sequence[fx.Node]
    returned: Sequence[torch.Tensor]
    results: Sequence[fx.Node]

    @staticmethod
    def of(
        nodes: Sequence[fx.Node],
        taken: Sequence[torch.Tensor],
        sources: Sequence[fx.Node | None],
        returned: Sequence[torch.Tensor],
    ) -> First | None:
        """The trace of a block that has just ended; None if it cannot be copied."""
        left, results = [*map(node_of, taken)], [*map(node_of, returned)]
        if None in sources or None in left or None in results:
            return None
        first = First(nodes, taken, sources, left, returned, results)  # type: ignore[arg-type]
        return first if first.can_be_copied else None

    @property
    def can_be_copied(self) -> bool:
        """True if it depends only on what it takes, and changes nothing else.

        It may write to a tensor that it takes, as to a cache, where no gradient passes.
        """
        own, sources = set(self.nodes), set(self.sources)
        if not own.issuperset(self.results) or len(sources) < len(self.sources):
            return False
        memory = [storage_key(tensor) for tensor in (*self.taken, *self.returned)]
        if len(set(memory[len(self.taken) :])) < len(self.results):
            return False
        if not set(memory[: len(self.taken)]).isdisjoint(memory[len(self.taken) :]):
            return False
        written = [self.taken[position] for position in self.written]
        if written and any(tensor.requires_grad for tensor in (*written, *self.returned)):
            return False
        known = own.union(sources)
        return bool(self.results) and all(
            _is_known(node) and _is_plain(node) and known.issuperset(node.all_input_nodes)
            for node in self.nodes
        )

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the taken tensors to whose memory it writes."""
        memory = {key for node in self.nodes for key in _memory_written_by(node)}
        places = enumerate(map(storage_key, self.taken))
        return tuple(position for position, key in places if key in memory)


@dataclass(eq=False)
class Template:
    """The operators of a block.

    Attributes:
        graph: all of them, the forward first.
        taken, cotangents: placeholders.
        forward, backward: operators, in order.
        left: behind the forward, the nodes of the tensors that the block takes.
        returned: the results of the forward.
        gradients: the gradient of each tensor that the block takes; None where there is none.
        locations: the user's lines.
        used_several_times: positions, among `taken`, of tensors that are used more than once.
        memory: the storage of the tensor that each placeholder stood for.
    """

    graph: fx.Graph
    taken: list[fx.Node]
    cotangents: list[fx.Node]
    forward: list[fx.Node]
    left: list[fx.Node]
    backward: list[fx.Node]
    returned: list[fx.Node]
    gradients: list[fx.Node | None]
    locations: dict[fx.Node, Location]
    used_several_times: frozenset[int]
    memory: dict[fx.Node, int | None]

    @staticmethod
    def of(first: First, recorder: OpRecorder, wanted: bool) -> Template:
        """Take the operators of a block from the graph in which it was traced.

        Args:
            first: the trace of the block.
            recorder: knows the user's lines.
            wanted: whether the backward is wanted, too. It is traced here, and its nodes are then
                removed from that graph.

        Raises:
            BlocksMisled: tensors that the block takes depend on each other, or were written to
                since, or its backward cannot be copied.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        locations: dict[fx.Node, Location] = {}

        def copy(node: fx.Node) -> fx.Node:
            new = copies[node] = copy_node(graph, node, copies.__getitem__)
            if node.name in recorder.locations:
                locations[new] = recorder.locations[node.name]
            return new

        pairs = zip((*first.taken, *first.returned), (*first.left, *first.results), strict=True)
        if any(node_of(tensor) is not node for tensor, node in pairs):
            raise BlocksMisled  # something has written to it since
        taken = [graph.placeholder(node.name) for node in first.sources]
        copies.update(zip(first.sources, taken, strict=True))
        several = frozenset(
            i for i, node in enumerate(first.sources) if _uses(node, first.nodes) > 1
        )
        template = Template(
            graph=graph,
            taken=taken,
            cotangents=[],
            forward=[copy(node) for node in first.nodes],
            left=[copies[node] for node in first.left],
            backward=[],
            returned=[copies[node] for node in first.results],
            gradients=[None] * len(taken),
            locations=locations,
            used_several_times=several,
            memory=dict(zip(taken, map(storage_key, first.taken), strict=True)),
        )
        if wanted and any(tensor.requires_grad for tensor in first.returned):
            template._add_backward(first, recorder, copies, copy)
        return template

    def _add_backward(
        self,
        first: First,
        recorder: OpRecorder,
        copies: dict[fx.Node, fx.Node],
        copy: Callable[[fx.Node], fx.Node],
    ) -> None:
        outer = nodes_so_far()
        before = len(outer)
        sources = [i for i, tensor in enumerate(first.taken) if tensor.requires_grad]
        _refuse_dependent([first.taken[i] for i in sources])
        chosen = [tensor for tensor in first.returned if tensor.requires_grad]
        recorder.backward = recorder.backward_of_block = True
        cotangents = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in chosen]
        gradients = torch.autograd.grad(
            chosen, [first.taken[i] for i in sources], cotangents, True, allow_unused=True
        )
        recorder.backward = recorder.backward_of_block = False
        new = list(itertools.islice(reversed(outer), len(outer) - before))
        for tensor in cotangents:
            node = _node(tensor)
            copies[node] = self.graph.placeholder(node.name)
            self.cotangents.append(copies[node])
            self.memory[copies[node]] = storage_key(tensor)
        pending = [node for node in reversed(new) if node not in copies]
        if not all(node.op == "call_function" and _is_plain(node) for node in pending):
            raise BlocksMisled
        self.backward += map(copy, pending)
        for i, gradient in zip(sources, gradients, strict=True):
            self.gradients[i] = None if gradient is None else copies[_node(gradient)]
        for node in new:
            node.graph.erase_node(node)


class Emitter:
    """Issues the operators of a block for other tensors.

    Args:
        template: the operators; None where no graph is made.
        stand_ins: tensors like the results, which no graph knows.
        requires_grad: which results require a gradient.
        recorder: gets the user's lines.
        mode: makes fakes.
    """

    def __init__(
        self,
        template: Template | None,
        stand_ins: Sequence[torch.Tensor],
        requires_grad: Sequence[bool],
        recorder: OpRecorder,
        mode: FakeTensorMode,
    ) -> None:
        self._template = template
        self._stand_ins = stand_ins
        self._recorder = recorder
        self._mode = mode
        self.requires_grad = requires_grad
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._memory: dict[int | None, torch.UntypedStorage] = {}

    def run(self, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the block."""
        if any(self.requires_grad):
            return _Emitted.apply(self, *taken)  # type: ignore[no-any-return,no-untyped-call]
        return self.forward(taken)

    def forward(self, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of the block, without gradients."""
        template = self._template
        if template is None or nodes_so_far() is None:
            return tuple(like(tensor, self._mode) for tensor in self._stand_ins)
        for node, tensor in zip(template.taken, taken, strict=True):
            self._take(node, tensor)
        self._issue(template, template.forward)
        for node, tensor in zip(template.left, taken, strict=True):
            self._track(tensor, node)  # the operator that has written to it
        return tuple(self._tracked(node) for node in template.returned)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the tensors that the block takes.

        Raises:
            BlocksMisled: the template has no backward for these gradients.
        """
        template = self._template
        cotangents = [g for g, needed in zip(gradients, self.requires_grad, strict=True) if needed]
        if template is None or len(cotangents) != len(template.cotangents):
            raise BlocksMisled
        for node, gradient in zip(template.cotangents, cotangents, strict=True):
            if gradient is None or node_of(gradient) is None or not gradient.is_contiguous():
                raise BlocksMisled
            self._take(node, gradient)
        self._issue(template, template.backward)
        return [None if node is None else self._tracked(node) for node in template.gradients]

    def _take(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Let a placeholder stand for a tensor."""
        assert self._template is not None
        self._nodes[node], self._values[node] = _node(tensor), tensor
        self._memory[self._template.memory[node]] = tensor.untyped_storage()

    def _issue(self, template: Template, nodes: Sequence[fx.Node]) -> None:
        graph, copies = graph_so_far(), self._nodes
        locations = self._recorder.locations
        # Without function modes: every access to a tensor's attribute would go through them.
        with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction():
            for node in nodes:
                value = self._values[node] = self._like(node.meta["val"])
                new = copies[node] = copy_node(graph, node, copies.__getitem__)
                new.meta["val"] = value
                if node in template.locations:
                    locations[new.name] = template.locations[node]

    def _like(self, value: Any) -> Any:
        """A fake like a value of the first block, in the memory of this one.

        An operator would give the same, in ten times the time.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._like, value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            size = storage.nbytes()
            memory = torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
            self._memory[storage._cdata] = memory
        plain = torch.empty(0, dtype=value.dtype, device="meta")
        plain.set_(memory, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(self._mode, plain, value.device)

    def _tracked(self, node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = self._values[node]
        self._track(value, node)
        return value

    def _track(self, value: torch.Tensor, node: fx.Node) -> None:
        """Let the copy of a node be that of a tensor."""
        new = self._nodes[node]
        if node_of(value) is not new:
            tracer = _tracer()
            track_tensor_tree(value, fx.Proxy(new, tracer), constant=None, tracer=tracer)


class _Emitted(OperatorFunction):
    """A block as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, emitter: Emitter, *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = emitter.forward(taken)
        ctx.emitter = emitter
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, emitter.requires_grad, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, needed in pairs if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.emitter.backward(gradients))


def like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake that is like a (fake) tensor, and that no graph knows."""
    with _disable_current_modes(), mode, torch.no_grad():
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "a graph is being made"
    return mode.tracer


def graph_so_far() -> fx.Graph:
    """The graph that is being made."""
    graph: fx.Graph = _tracer().graph
    return graph


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node of a tensor in the graph that is being made; None if it has none."""
    slot: Any = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


def _node(tensor: torch.Tensor) -> fx.Node:
    node = node_of(tensor)
    assert node is not None
    return node


def _uses(node: fx.Node, users: Sequence[fx.Node]) -> int:
    """How often operators take a node."""
    operands: list[fx.Node] = []
    for user in users:
        fx.node.map_arg((user.args, user.kwargs), operands.append)
    return operands.count(node)


def _is_known(node: fx.Node) -> bool:
    """True if a node computes a value, and writes to nothing but memory that is known."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if writes_in_secret(target, node.args, node.kwargs):
        return False
    return None not in _memory_written_by(node)


def _memory_written_by(node: fx.Node) -> set[int | None]:
    """The memory that a node writes to; None where it has no plain storage."""
    written = written_values(node.target, node.args, node.kwargs)
    values = [value.meta.get("val") for value in written if isinstance(value, fx.Node)]
    return {storage_key(v) if isinstance(v, torch.Tensor) else None for v in values}


def _is_plain(node: fx.Node) -> bool:
    """True if all tensors that a node computes are dense."""
    values = node.meta.get("val")
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return all(
        type(v) is FakeTensor
        and v.layout is torch.strided
        and not (v.is_conj() or v.is_neg() or v.is_quantized)
        for v in tensors
    )


def _refuse_dependent(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of which one was computed from another: gradients would go both ways.

    Raises:
        BlocksMisled: there are such tensors.
    """
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
    pending: list[Any] = [next_ for edge in edges for next_, _ in edge.node.next_functions]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    if any(edge.node in seen for edge in edges):
        raise BlocksMisled
