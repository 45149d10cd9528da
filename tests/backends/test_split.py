"""Graphs that are compiled in parts compute what they compute as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cg.backends.fusion.repeats import find_repeat
from cg.backends.fusion.split import ALIGNMENT, CompiledGraphs, Compute, compile_in_parts, fake_like

WIDTH = 8
ATEN = torch.ops.aten


class Compiler:
    """Runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, fakes: Sequence[Tensor]) -> Compute:
        self.graphs.append(module)

        def run(values: list[Tensor]) -> Sequence[Tensor]:
            for value, fake in zip(values, fakes, strict=True):
                assert (value.shape, value.stride()) == (fake.shape, fake.stride())
                assert (value.data_ptr() - _place(fake)) % ALIGNMENT == 0
            arguments = list(values)
            values.clear()
            results: Sequence[Tensor] = module(*arguments)
            return results

        return run

    def named(self, target: Any) -> list[int]:
        """How often an operator stands in each graph."""
        return [sum(n.target is target for n in graph.graph.nodes) for graph in self.graphs]


def _place(fake: Tensor) -> int:
    """Bytes from the beginning of its memory to the first of a tensor."""
    return fake.storage_offset() * fake.itemsize


def compiled(
    function: Callable[..., Any], inputs: Sequence[Tensor], least: int = 8
) -> tuple[Compute, Compiler]:
    """The code of a function that returns a tuple, and the compiler with what it has compiled."""
    module = make_fx(function)(*(x.clone() for x in inputs))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    fakes = [fake_like(x, mode) for x in inputs]
    compiler = Compiler()
    return compile_in_parts(module, fakes, mode, CompiledGraphs(compiler), least), compiler


def check(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Compiler:
    """Compare results, and what inputs hold afterwards."""
    compute, compiler = compiled(function, inputs)
    right, own = [x.clone() for x in inputs], [x.clone() for x in inputs]
    torch.manual_seed(1)
    expected = function(*right)
    torch.manual_seed(1)
    values = list(own)
    results = compute(values)
    assert not values
    for result, other in zip((*results, *own), (*expected, *right), strict=True):
        assert torch.equal(result, other)
    return compiler


def weights(layers: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(layers) for shape in shapes]


X = weights(1, (4, WIDTH))[0]


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    one, other = (torch.nn.functional.layer_norm(x, (WIDTH,)) @ up).chunk(2, -1)
    return x + torch.sigmoid(one) * other @ down


def model(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    x = x.cos()
    for up, down in zip(parameters[::2], parameters[1::2], strict=True):
        x = layer(x, up, down)
    return x.sin(), x.sum()


LAYER = (WIDTH, 2 * WIDTH), (WIDTH, WIDTH)


def test_layers_are_compiled_once() -> None:
    compiler = check(model, [X, *weights(6, *LAYER)])
    # Ahead of the layers, a layer, and behind: cuts stand behind products.
    assert len(compiler.graphs) == 3
    assert sum(compiler.named(ATEN.mm.default)) < 5
    assert all(
        node.target is ATEN.mm.default
        for node in compiler.graphs[1].graph.output_node().all_input_nodes
        if node.target is not ATEN.add.Tensor
    )


def test_columns_are_where_layers_take_them() -> None:
    """Compiled code would copy them, once a layer, if it took them for aligned."""

    def layers(x: Tensor, table: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        row, column = table[:, 2:3], table[:, 4]
        for weight in weights:
            x = torch.relu(x @ weight) + row.sin() * column.cos()
            x = x.exp().tanh()
        return (x,)

    table = torch.randn(1, 9, dtype=torch.float64)
    inputs = torch.randn(WIDTH, dtype=torch.float64), table[:, 1:]
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    run, compiler = compiled(layers, (*inputs, *weights))
    assert len(compiler.graphs) < len(weights)
    torch.testing.assert_close(run([*inputs, *weights]), layers(*inputs, *weights))


def test_few_operators_are_compiled_as_a_whole() -> None:
    compute, compiler = compiled(model, [X, *weights(3, *LAYER)], least=1000)
    assert len(compiler.graphs) == 1
    assert len(compute([X, *weights(3, *LAYER)])) == 2


def test_two_kinds_of_layers() -> None:
    """Each has code of its own, and so have two stacks."""

    def stacks(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        (x, _), half = model(x, *parameters), len(parameters) // 2
        for up, down in zip(parameters[:half:2], parameters[1:half:2], strict=True):
            x = torch.tanh(x @ up)[:, :WIDTH].exp() @ down
        for number, (up, down) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            x = layer(x * (2.0 if number % 2 else 3.0), up, down)
        return (x,)

    compiler = check(stacks, [X, *weights(8, *LAYER)])
    assert sum(compiler.named(ATEN.mm.default)) < 16
    assert sum(compiler.named(ATEN.mm.default)) >= 8


def test_results_of_layers_are_given() -> None:
    """As those that a forward saves; an input, and a value twice."""

    def saving(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        saved = [x]
        for up, down in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, up, down)
            saved += [x, x.exp()]
        return *saved, saved[3]

    assert len(check(saving, [X, *weights(6, *LAYER)]).graphs) < 6


def test_pools_that_layers_write_to() -> None:
    def caching(x: Tensor, at: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        for up, down, pool in zip(parameters[::3], parameters[1::3], parameters[2::3], strict=True):
            pool.index_put_((at,), x)
            x = layer(x + pool[:4], up, down)
        return (x,)

    inputs = [X, torch.tensor([0, 3, 2, 5]), *weights(5, *LAYER, (7, WIDTH))]
    assert len(check(caching, inputs).graphs) == 3


def test_no_cut_parts_memory_that_is_written_to() -> None:
    """A part would not know that two of its inputs share memory."""

    def writing(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        x = x.clone()
        rows = x[1:3]
        for up, down in zip(parameters[::2], parameters[1::2], strict=True):
            rows.add_(1)
            x = x + layer(x, up, down)[0]
        return x, rows

    assert len(check(writing, [X, *weights(6, *LAYER)]).graphs) == 1


def test_numbers_are_drawn_in_order() -> None:
    def dropping(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        for up, down in zip(parameters[::2], parameters[1::2], strict=True):
            x = torch.nn.functional.dropout(layer(x, up, down), 0.5)
        return (x,)

    assert len(check(dropping, [X, *weights(6, *LAYER)]).graphs) == 3


def test_values_go_after_their_last_use() -> None:
    """A layer's input is held by nobody once the next layer has run."""
    inputs = [X, *weights(6, *LAYER)]
    module = make_fx(model)(*inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def compile_(part: fx.GraphModule, part_fakes: Sequence[Tensor]) -> Compute:
        def run(values: list[Tensor]) -> Sequence[Tensor]:
            arguments = list(values)
            values.clear()
            results: Sequence[Tensor] = part(*arguments)
            seen.extend(map(weakref.ref, results))
            del arguments
            alive.append(sum(ref() is not None for ref in seen))
            return results

        return run

    compute = compile_in_parts(module, fakes, mode, CompiledGraphs(compile_), 8)
    own = [x.clone() for x in inputs]
    weak = list(map(weakref.ref, own))
    compute(own)
    assert max(alive) <= 3  # the residual stream and a product, and what has just come
    assert not any(ref() is not None for ref in weak)


class Scaled(nn.Module):
    """Multiplies by constants, of which it may write to one."""

    def __init__(self, number: float, vector: Tensor, is_counting: bool = False) -> None:
        super().__init__()
        self.number, self.vector = torch.tensor(number), vector
        self.is_counting = is_counting

    def graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        for name in ("number", "vector"):
            x = graph.call_function(ATEN.mul.Tensor, (x, graph.get_attr(name)))
        if self.is_counting:
            graph.call_function(ATEN.add_.Tensor, (graph.get_attr("number"), 1.0))
        graph.output((x,))
        return fx.GraphModule(self, graph)


def compiled_together(modules: Sequence[fx.GraphModule], inputs: Sequence[Tensor]) -> int:
    """How many of several graphs of one input are compiled; all compute what they should."""
    compiler = Compiler()
    graphs = CompiledGraphs(compiler)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    for module, x in zip(modules, inputs, strict=True):
        with mode:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        compute = compile_in_parts(module, [fake], mode, graphs)
        if not any(node.target is ATEN.add_.Tensor for node in module.graph.nodes):
            assert torch.equal(compute([x.clone()])[0], module(x)[0])
    return len(compiler.graphs)


def test_equal_graphs_are_compiled_once() -> None:
    vector = torch.arange(WIDTH) / 2
    modules = [Scaled(3.0, vector).graph() for _ in range(3)]
    assert compiled_together(modules, [X, 2 * X, 3 * X]) == 1


def test_graphs_that_differ_are_compiled_each() -> None:
    vector = torch.arange(WIDTH) / 2
    modules = [
        Scaled(3.0, vector),
        Scaled(4.0, vector),  # another number
        Scaled(3.0, vector + 1),  # other numbers
        Scaled(3.0, vector.double()),
    ]
    assert compiled_together([m.graph() for m in modules], [X] * 4) == 4
    assert compiled_together([modules[0].graph()] * 2, [X, X.t().contiguous().t()]) == 2


def test_constants_that_are_written_to_are_of_one_graph() -> None:
    vector = torch.ones(WIDTH)
    one, other = (Scaled(3.0, vector, is_counting=True) for _ in range(2))
    assert compiled_together([one.graph(), other.graph()], [X, X]) == 2
    assert one.number == other.number == 3  # compiling writes to nothing


@settings(deadline=None, max_examples=40)
@given(
    layers=st.integers(1, 7),
    ops=st.lists(st.sampled_from(["mm", "chunk", "norm", "write", "save", "add"]), max_size=7),
    ahead=st.integers(0, 3),
    behind=st.integers(0, 3),
    least=st.integers(1, 20),
)
def test_random_stacks(layers: int, ops: list[str], ahead: int, behind: int, least: int) -> None:
    def stack(x: Tensor, pool: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        start = x
        for _ in range(ahead):
            x = x.sin()
        for weight in parameters:
            for op in ops:
                if op == "mm":
                    x = x @ weight
                elif op == "chunk":
                    one, other = x.chunk(2, -1)
                    x = torch.cat([other, one * 2], -1)
                elif op == "norm":
                    x = torch.nn.functional.layer_norm(x, (WIDTH,))
                elif op == "write":
                    pool[1:3].mul_(0.5)
                    x = x + pool
                elif op == "save":
                    results.append(x)
                else:
                    x = x + start
        for _ in range(behind):
            x = x.cos()
        return *results, x

    inputs = [X, X * 2, *weights(layers, (WIDTH, WIDTH))]
    compute, _ = compiled(stack, inputs, least)
    right, own = [x.clone() for x in inputs], [x.clone() for x in inputs]
    expected = stack(*right)
    for result, other in zip((*compute(list(own)), *own), (*expected, *right), strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize(
    ("letters", "costs", "expected"),
    [
        ("xababab", {}, (1, 2, 3)),
        ("abcabcabca", {0: 5, 3: 5, 6: 5, 9: 5}, (1, 3, 3)),
        ("abcabcabc", {}, (0, 3, 3)),
        ("abcabcabc", {3: float("inf")}, (1, 3, 2)),
        ("abcdefg", {}, None),
    ],
)
def test_where_regions_begin(
    letters: str, costs: dict[int, float], expected: tuple[int, int, int] | None
) -> None:
    graph = fx.Graph()
    nodes = [graph.call_function(ord, (letter,)) for letter in letters]
    prices = [costs.get(index, 2.0) for index in range(len(nodes) + 1)]
    repeat = find_repeat(nodes, lambda node: node.args, prices, least=2)
    assert expected == (repeat and (repeat.start, repeat.length, repeat.count))
