"""Records of tensors in a traced step: torch functions, constants, random numbers, writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cg.ir.ops import Call, Constant
from cg.ir.types import Place

from .step_tools import Bench, PlainStage, calls, text


class DropoutStage(PlainStage):
    def dropped(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x)


@pytest.fixture
def bench() -> Bench:
    return Bench(3)


def stages(bench: Bench) -> list[Any]:
    return bench.stages(DropoutStage, range(3))


X = torch.ones(4, 4)


def test_torch_functions_are_recorded_once_for_each_signature(bench: Bench) -> None:
    def step(x: Any, y: Any) -> Any:
        a = x + y
        b = a + y
        c = b + 1
        return torch.nn.functional.cross_entropy(c, torch.zeros(4, dtype=torch.long)).exp()

    trace = bench.trace(step, X, X)
    assert calls(trace) == [
        *("torch.add", "torch.add", "torch.add.1"),
        *("torch.cross_entropy", "torch.exp"),
    ]
    assert bench.tracer.traced == ["torch.add", "torch.add.1", "torch.cross_entropy", "torch.exp"]


def test_places_of_torch_functions(bench: Bench) -> None:
    one, two, _ = stages(bench)

    def step(x: Any, y: Any) -> Any:
        replicated = x + y
        a, b = one.forward(x), two.forward(x)
        last = a + b  # b was made last
        a = one.forward(x)
        return replicated, last, b + a, a * replicated

    trace = bench.trace(step, X, X)
    places = {op.result.name: str(op.place) for op in trace.module.program.ops[:-1]}
    assert places["add"] == "@{0..2}"
    assert places["add.1"] == "@1"
    assert places["add.2"] == "@0"
    assert places["mul"] == "@0"


def test_a_replicated_function_runs_on_the_ranks_that_its_operands_share(bench: Bench) -> None:
    def step(x: Any) -> Any:
        return x + torch.ones(4)

    trace = bench.trace_at(step, (X,), inputs=Place.of(1, 2))
    assert str(trace.module.program.ops[1].place) == "@{1..2}"


def test_shapes_and_dtypes_are_python_values(bench: Bench) -> None:
    def step(x: Any) -> Any:
        assert isinstance(x, torch.Tensor)
        assert x.shape == (4, 4)
        assert x.size(0) == len(x) == x.dim() * 2 == 4
        assert x.dtype is torch.float32
        assert x.numel() == 16
        assert not x.requires_grad
        assert x.device == torch.device("cpu")
        assert x.is_floating_point()
        assert not x.is_cuda
        assert x != None  # noqa: E711 - as plain tensors
        assert hash(x) == hash(x)
        return {"n": x.shape[0], "none": None, "f": 0.5, "x": x}

    trace = bench.trace(step, X)
    assert text(trace) == ["return(%x) {at = {0..2}}"]
    assert trace.outputs.rebuild([X]) == {"n": 4, "none": None, "f": 0.5, "x": X}


def test_properties_indices_lists_and_tuples(bench: Bench) -> None:
    def step(x: Any) -> Any:
        rows = list(x)
        a = x.T + x**2 - (1 - x)
        b = torch.cat([rows[0], x[1, :2], x[:, 1:][0]])
        values, indices = a.max(dim=0)
        left, right = a.chunk(2)
        return b, values, indices, left @ right.mT, x.to(torch.float64), x.detach(), -x

    trace = bench.trace(step, X)
    names = calls(trace)
    assert names[:4] == ["torch.unbind", "torch.T", "torch.pow", "torch.add"]
    assert "torch.cat" in names
    assert trace.module.program.outputs[2].type.dtype.value == "i64"  # type: ignore[union-attr]
    assert str(trace.outputs.tree.leaves[4].dtype) == "torch.float64"  # type: ignore[union-attr]


def test_slices_with_equal_bounds_share_a_function(bench: Bench) -> None:
    def step(x: Any) -> Any:
        return [x[a : a + 2] for a in (0, 1, 0)]

    assert calls(bench.trace(step, X)) == ["torch.getitem", "torch.getitem.1", "torch.getitem"]


def test_tensors_from_nothing_are_constants(bench: Bench) -> None:
    def step(x: Any) -> Any:
        made = [
            torch.zeros(2, dtype=torch.int32),
            torch.ones(2, dtype=torch.bool),
            torch.full((2,), 0.5, device="cpu"),
            torch.arange(3),
            torch.tensor([1.0, 2.0]),
            torch.full((1,), float("nan")),
        ]
        return made, x

    trace = bench.trace(step, X)
    constants = [op for op in trace.module.program.ops if isinstance(op, Constant)]
    assert [op.fill for op in constants] == [0, True, 0.5, None, None, None]
    assert [type(op.fill) for op in constants[:3]] == [int, bool, float]
    refs = [op.ref.name for op in constants if op.ref is not None]
    assert torch.equal(trace.constants[refs[0]], torch.arange(3))
    assert torch.equal(trace.constants[refs[1]], torch.tensor([1.0, 2.0]))
    assert all(str(op.place) == "@{0..2}" for op in constants)


def test_random_functions_have_keys(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        noise = torch.randn(4, 4, device="cpu")
        state = torch.zeros(4)
        state.normal_()
        return first.dropped(x) + noise, first.dropped(x), torch.nn.functional.dropout(x), state

    trace = bench.trace(step, X)
    keys = [op.key for op in trace.module.program.ops if isinstance(op, Call)]
    assert keys == [0, 1, 2, None, 3, 4]
    assert str(trace.module.program.ops[0].place) == "@{0..2}"


def test_uninitialised_tensors_are_made_anew_each_time(bench: Bench) -> None:
    trace = bench.trace(lambda x: (torch.empty(3), x), X)
    assert calls(trace) == ["torch.empty"]


def test_writes_rebind_the_tensor(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        same = h
        h += 1
        h[0] = h[1] * 2
        h.mul_(3)
        torch.nn.functional.relu(h, inplace=True)
        torch.nn.functional.relu(h, True)
        assert same is h
        return same

    trace = bench.trace(step, X)
    assert text(trace) == [
        "%forward = call(%x) {fn = @stage0.forward} : f32[4,4]@0",
        "%add_ = call(%forward) {fn = @torch.add_} : f32[4,4]@0",
        "%getitem = call(%add_) {fn = @torch.getitem} : f32[4]@0",
        "%mul = call(%getitem) {fn = @torch.mul} : f32[4]@0",
        "%setitem = call(%add_, %mul) {fn = @torch.setitem} : f32[4,4]@0",
        "%mul_ = call(%setitem) {fn = @torch.mul_} : f32[4,4]@0",
        "%relu = call(%mul_) {fn = @torch.relu} : f32[4,4]@0",
        "%relu.1 = call(%relu) {fn = @torch.relu} : f32[4,4]@0",
        "return(%relu.1) {at = {0..2}}",
    ]
    value = torch.ones(4, 4)
    (written,) = trace.bodies["torch.add_"](value)
    assert torch.equal(written, torch.full((4, 4), 2.0))
    assert torch.equal(value, torch.ones(4, 4))


def test_a_write_changes_whether_a_gradient_is_required(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        h = torch.zeros(4, 4)
        assert not h.requires_grad
        h += first.forward(x)
        assert h.requires_grad
        return h

    bench.trace(step, X)


def test_a_view_that_is_gone_is_no_obstacle_to_a_write(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        row = h[0]
        total = row.sum()
        del row
        h[0] = 0
        return h, total

    assert calls(bench.trace(step, X))[-1] == "torch.setitem"


def test_several_threads_of_values_keep_unique_names(bench: Bench) -> None:
    def step(x: Any, add: Any) -> Any:
        return x + add, x + add

    trace = bench.trace(step, X, X)
    assert text(trace)[:2] == [
        "%add.1 = call(%x, %add) {fn = @torch.add} : f32[4,4]@{0..2}",
        "%add.2 = call(%x, %add) {fn = @torch.add} : f32[4,4]@{0..2}",
    ]


def test_seeds_set_before_the_step_are_kept(bench: Bench) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    bench.trace(lambda x: x + torch.rand(4), X)
    assert torch.equal(before, torch.get_rng_state())
