"""Functions of single scores as text: what `score_mod` and `mask_mod` of `flex_attention` compute.

A function is recorded on one score and its four indices. Tensors that it takes from outside become
inputs behind these. The text is an argument of an operator, so that a graph has nothing in it but
operators and plain data, and is compared, stored and cut over ranks as any other graph.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...values.operators import is_random, written_values
from ..stored.function_names import operator_name, operator_named
from ..stored.plain_text import NotStorable, decoded, encoded

_ATEN = torch.ops.aten
_INDICES = 4
"""The indices of a score: of the batch, the head, the query and the key."""

Runs: TypeAlias = tuple[int, ...]
"""The indices that a rank has of a dimension, as bounds of intervals: `(0, 4, 12, 16)` are two
intervals of four. Without bounds, indices begin at 0."""

WHOLE_RUNS: tuple[Runs, Runs, Runs, Runs] = ((), (), (), ())
"""The indices of the batch, the heads, the queries and the keys of a process that has all."""


class NotRecordable(Exception):
    """A function of scores has no text.

    Attributes:
        reason: why, as the end of a sentence about the function.
        remedy: what to do instead.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True)
class Modification:
    """A function of a score and its indices, or of the indices alone.

    Attributes:
        text: what it computes.
        captured: the tensors that it takes from outside, in the order of the text's inputs.
    """

    text: str
    captured: tuple[Tensor, ...]


def recorded(function: Callable[..., Any], score: Tensor | None, mode: FakeTensorMode) -> Any:
    """Record a function.

    Args:
        function: `score_mod`, or `mask_mod` if there is no `score`.
        score: a fake score.
        mode: makes fakes.

    Returns:
        The `Modification`.

    Raises:
        NotRecordable: it has no text.
    """
    device = torch.device("cpu") if score is None else score.device
    with _disable_current_modes(), mode:
        indices = [_index(device) for _ in range(_INDICES)]
        examples = indices if score is None else [score, *indices]
        recorder = _ScoreRecorder(examples)
        with recorder, _indexing().TransformGetItemToIndex():
            result = function(*examples)
    if not isinstance(result, Tensor):
        raise NotRecordable(f"gives a {type(result).__name__}, not a tensor", "give a tensor")
    _refuse_python_backward(result)
    graph = recorder.finish(result)
    return Modification(text_of(graph), tuple(recorder.captured))


def _indexing() -> Any:
    """Torch's module in which tensors are indexed by single indices.

    It is imported when a function is recorded: TorchDynamo comes with it, and sympy.
    """
    return importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")


def _index(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)


class _ScoreRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes the operators of a function into a graph.

    Attributes:
        captured: the tensors that the function has taken from outside.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured: list[Tensor] = []
        self._graph = fx.Graph()
        self._held: list[Any] = [*examples]  # so that no other tensor gets the same id
        self._nodes: dict[int, fx.Node] = {}
        for example in examples:
            self._last = self._nodes[id(example)] = self._graph.placeholder("index")

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if is_random(func, args, kwargs):
            raise NotRecordable("draws random numbers", "draw them outside of it, and index them")
        if any(value is not None for value in written_values(func, args, kwargs)):
            raise NotRecordable(f"writes in place ({func})", "make a new tensor: x = x + y")
        if func in _LIFTS:
            node = self._constant(args[0])
        else:
            try:
                operator_name(func)
            except NotStorable as error:
                raise NotRecordable(f"uses {error}", "use torch's own operators") from error
            count = len(args[1]) if func is _ATEN.index.Tensor else 0
            own_args, own_kwargs = self._mapped(count, args), self._mapped(count, kwargs)
            node = self._graph.call_function(func, own_args, own_kwargs)
        result = func(*args, **kwargs)
        self._note(result, node)
        return result

    def finish(self, result: Tensor) -> fx.Graph:
        """The graph of the function that gives this result."""
        self._graph.output(self._node(0, result))
        self._graph.eliminate_dead_code()
        return self._graph

    def _mapped(self, count: int, values: Any) -> Any:
        if isinstance(values, Tensor):
            return self._node(count, values)
        if isinstance(values, dict):
            return {name: self._mapped(count, value) for name, value in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)(self._mapped(count, value) for value in values)
        return values

    def _note(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self._held.append(result)
            self._nodes[id(result)] = node
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                self._note(part, self._graph.call_function(operator.getitem, (node, index)))

    def _node(self, count: int, tensor: Tensor) -> fx.Node:
        """The node of a tensor, which is an input if the function has taken it from outside.

        So many indices are given with it. Torch adds up gradients of single numbers alone.
        """
        node = self._nodes.get(id(tensor))
        if node is None:
            if not isinstance(tensor, FakeTensor):
                raise NotRecordable(
                    f"takes a tensor ({tensor.dtype}, shape {tuple(tensor.shape)}) that is neither "
                    "an argument of the method nor part of the actor: a graph would keep today's "
                    "values forever",
                    "register it as a buffer of the actor, pass it as an argument, or build it "
                    "inside the method",
                )
            with self._graph.inserting_after(self._last):
                node = self._last = self._graph.placeholder("captured")
            self.captured.append(tensor)
            self._note(tensor, node)
        is_number = 0 < count == tensor.dim()
        if tensor.requires_grad and node in self._inputs() and not is_number:
            how = f"with {count} of {tensor.dim()} indices" if count else "without an index"
            raise NotRecordable(
                f"takes a tensor that requires a gradient, shape {tuple(tensor.shape)}, {how}",
                "give all indices at once, bias[h, i]; and a scalar a dimension, scalar[b * 0]",
            )
        return node

    def _inputs(self) -> set[fx.Node]:
        return {self._nodes[id(tensor)] for tensor in self.captured}

    def _constant(self, value: Tensor) -> fx.Node:
        """The node of what `torch.tensor` makes of a number."""
        if value.dim():
            raise NotRecordable(
                "makes a tensor of several numbers", "make it in the method, outside of it"
            )
        with _disable_current_modes():
            number = value.item()
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        return self._graph.call_function(_ATEN.scalar_tensor.default, (number,), options)


_LIFTS = (_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default)


def _refuse_python_backward(result: Tensor) -> None:
    """Refuse derivatives in Python, which the text of the forward does not say.

    Raises:
        NotRecordable: there is one.
    """
    pending: list[Any] = [result.grad_fn]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        kind = getattr(node, "_forward_cls", None)
        if kind not in (None, _indexing().ModIndex):
            raise NotRecordable(
                f"uses {kind.__name__}, a torch.autograd.Function",
                "use operators that torch differentiates",
            )
        pending += [following for following, _ in node.next_functions]


def joint_text(score: Modification, example: Tensor, needs: Sequence[bool]) -> str:
    """The text of the derivative of a function of scores.

    Args:
        score: the function.
        example: a fake score.
        needs: for each tensor that it captures, whether its gradient is needed.

    Returns:
        Of a function that takes a score, its indices, the gradient of what `score` gives, and the
        captured tensors. It gives the gradients of all but the gradient.

    Raises:
        NotRecordable: the function does not use the score.
    """
    mode = example.fake_mode  # type: ignore[attr-defined]
    with _disable_current_modes(), mode, torch.enable_grad():
        first = torch.zeros_like(example, requires_grad=True)
        indices = [_index(first.device) for _ in range(_INDICES)]
        captured = [
            torch.empty_like(tensor, requires_grad=is_needed)
            for tensor, is_needed in zip(score.captured, needs, strict=True)
        ]
        forward = _module(score.text, True, RankRuns(), differentiable=True)
        make: Any = create_fw_bw_graph
        graph: fx.Graph = make(forward, (first, *indices), tuple(captured))[1].graph
    if graph.output_node().args[0][0] is None:  # type: ignore[index]
        raise NotRecordable("gives what no score goes into", "give score * 0 + x instead of x")
    graph.eliminate_dead_code()
    return text_of(graph)


def text_of(graph: fx.Graph) -> str:
    """The text of a graph of operators."""
    numbers: dict[fx.Node, int] = {}
    rows: list[Any] = []

    def reference(value: Any) -> int | None:
        return numbers[value] if isinstance(value, fx.Node) else None

    for node in graph.nodes:
        if node.op == "placeholder":
            rows.append([])
        elif node.op == "output":
            rows.append([encoded(node.args[0], reference)])
        else:
            name = "" if node.target is operator.getitem else operator_name(node.target)
            arguments = encoded(tuple(node.args), reference)
            rows.append([name, arguments, encoded(dict(node.kwargs), reference)])
        numbers[node] = len(numbers)
    return json.dumps(rows, separators=(",", ":"))


@dataclass(frozen=True)
class RankRuns:
    """The indices and pieces of attention that a rank has.

    Attributes:
        runs: the indices of the batch, the heads, the queries and the keys.
        shapes: the shapes of its pieces of the tensors that a function captures.
        aligned: for each dimension of these, the number of the index that alone indexes it. Such a
            dimension is cut as that of the index is, so it is indexed by what the rank has.
    """

    runs: tuple[Runs, ...] = WHOLE_RUNS
    shapes: tuple[tuple[int, ...], ...] = ()
    aligned: tuple[tuple[int | None, ...], ...] = ()


@functools.lru_cache(maxsize=1024)
def modification(text: str, takes_score: bool, rank: RankRuns) -> fx.GraphModule:
    """The function of a text, for a rank, whose indices are those of what the rank has.

    Args:
        text: of a function, or of its derivative.
        takes_score: whether a score precedes the indices.
        rank: what the rank has.
    """
    return _module(text, takes_score, rank, differentiable=False)


def _module(text: str, takes_score: bool, rank: RankRuns, differentiable: bool) -> fx.GraphModule:
    graph = fx.Graph()
    rows = json.loads(text)
    count = sum(not row for row in rows)
    nodes: list[Any] = [graph.placeholder(f"input_{number}") for number in range(count)]
    first = int(takes_score)
    local = nodes[first : first + _INDICES]
    for index, bounds in enumerate(rank.runs, first):
        nodes[index] = _global_index(graph, nodes[index], bounds)
    of_whole = nodes[first : first + _INDICES]
    sources = _captured_by_row(rows, count - len(rank.aligned))
    for number, row in enumerate(rows[count:], count):
        if len(row) == 1:
            graph.output(decoded(row[0], nodes.__getitem__))
            continue
        name, arguments, named = row
        target: Any = operator_named(name) if name else operator.getitem
        args, kwargs = (decoded(part, nodes.__getitem__) for part in (arguments, named))
        captured = sources.get(number)
        if captured is not None and captured < len(rank.aligned):
            pairs = zip(args[1], _of_length(rank.aligned[captured], len(args[1])), strict=True)
            places = [
                node if which is None or node is not of_whole[which] else local[which]
                for node, which in pairs
            ]
            shape = args[0] if target is _ATEN.index.Tensor else list(rank.shapes[captured])
            args = (shape, places, *args[2:])
        if differentiable and target is _ATEN.index.Tensor:
            target = _indexing().mod_index  # its gradient is of a shape that scores do not add to
        nodes.append(graph.call_function(target, args, kwargs))
    return fx.GraphModule({}, graph)


def _of_length(values: Sequence[int | None], length: int) -> Sequence[int | None]:
    return [*values, *[None] * length][:length]


_SCATTER = "torch.ops.flex_lib.zeros_and_scatter.default"
_INDEX = "torch.ops.aten.index.Tensor"


def _captured_by_row(rows: Sequence[Any], first: int) -> dict[int, int]:
    """The captured tensor that a row indexes, or that it is the gradient of.

    Args:
        rows: of a text.
        first: the number of the first captured tensor.
    """
    count = sum(not row for row in rows)
    sources = {
        number: row[1][1] - first
        for number, row in enumerate(rows)
        if row and row[0] == _INDEX and first <= row[1][1] < count
    }
    if any(row and row[0] == _SCATTER for row in rows):  # gradients of all inputs but the last
        _, *gradients = rows[-1][0]
        for captured, gradient in enumerate(gradients[-(count - first) :] if count > first else ()):
            pending = [gradient]
            while pending:
                number = pending.pop()
                if type(number) is int and number >= count:
                    row = rows[number]
                    if row[0] == _SCATTER:
                        sources[number] = captured
                    else:
                        pending += [part for part in row[1][1:] if type(part) is int]
    return sources


def aligned_dimensions(
    text: str, takes_score: bool, captured: Sequence[Tensor], lengths: Sequence[int]
) -> tuple[tuple[int | None, ...], ...]:
    """For each dimension of captured tensors, the number of the index that alone indexes it.

    Indices of keys are left out, since a rank may have the keys of any other.

    Args:
        text: of a function.
        takes_score: whether a score precedes the indices.
        captured: the tensors that it captures.
        lengths: how many indices of the batch, the heads and the queries there are.
    """
    rows = json.loads(text)
    first = int(takes_score)
    count = sum(not row for row in rows)
    uses: list[list[set[int | None]]] = [[set() for _ in tensor.shape] for tensor in captured]
    for row in rows:
        for source, tensor in enumerate(captured, count - len(captured)):
            own = uses[source - count + len(captured)]
            if not row or not _refers(row[1:] if len(row) > 1 else row, source):
                continue
            is_index = row[0] == _INDEX and row[1][1] == source
            places = row[1][2][1:] if is_index else []
            for dim, size in enumerate(tensor.shape):
                place = places[dim] if dim < len(places) else None
                which = place - first if type(place) is int else None
                is_known = which is not None and 0 <= which < len(lengths)
                own[dim].add(which if is_known and lengths[which or 0] == size else None)
    return tuple(tuple(next(iter(dim)) if len(dim) == 1 else None for dim in dims) for dims in uses)


def reads_index(text: str, number: int) -> bool:
    """True if the function of a mask computes with an index, of which there are four."""
    rows = [row for row in json.loads(text) if row]
    made_of_nothing = [row for row in rows if row[0] in _NEW]
    return any(_refers(row, number) for row in rows if row not in made_of_nothing)


_NEW = ("torch.ops.aten.new_ones.default", "torch.ops.aten.new_zeros.default")


def _refers(json_value: Any, number: int) -> bool:
    """True if an encoded value refers to a node."""
    if type(json_value) is list:
        return any(_refers(part, number) for part in json_value)
    return type(json_value) is int and json_value == number


def _global_index(graph: fx.Graph, index: fx.Node, bounds: Runs) -> fx.Node:
    """An index of the whole, from an index of what a rank has."""
    result, shift, before = index, 0, 0
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        if start - before != shift:
            shift = start - before
            moved = graph.call_function(_ATEN.add.Tensor, (index, shift))
            if before:
                is_behind = graph.call_function(_ATEN.ge.Scalar, (index, before))
                moved = graph.call_function(_ATEN.where.self, (is_behind, moved, result))
            result = moved
        before += stop - start
    return result
