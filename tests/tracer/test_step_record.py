"""What a traced step records: calls, torch functions, constants, writes, places, names."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from cg.ir.module import Phase
from cg.ir.ops import Call, Constant
from cg.ir.parser import parse_module
from cg.ir.printer import format_module
from cg.ir.types import Place
from cg.tracer.microbatches import microbatches
from cg.tracer.step import trace_step
from cg.tracer.values import OBJECT

from .step_tools import Bench, Opaque, calls, opaque, refusal, text, writes


class Batch(NamedTuple):
    tokens: Any
    labels: Any


class Stage(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.linear(x).relu()

    def several(self, x: Any, scale: float = 1.0, *, options: Any = None) -> Any:
        return {"a": x["in"] * scale, "b": [x["in"] + 1, None, "text", 7]}

    @writes
    def update(self) -> None:
        self.count.add_(1)

    def weight(self) -> Any:
        return self.linear.weight

    def dropped(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x)

    @opaque
    def say(self, x: Any) -> Any:
        return Opaque()

    @staticmethod
    def double(x: Any) -> Any:
        return x * 2


@pytest.fixture
def bench() -> Bench:
    return Bench(3)


def stages(bench: Bench) -> list[Any]:
    actor = bench.actor(type("Stage", (Stage,), {}))
    return [actor.on(rank)() for rank in range(3)]


X = torch.ones(4, 4)


def test_calls_chain_over_actors(bench: Bench) -> None:
    actors = stages(bench)

    def step(x: Any) -> Any:
        for actor in actors:
            x = actor.forward(x)
        return x

    trace = bench.trace(step, X)
    assert trace.module.phase is Phase.TRACED
    assert text(trace) == [
        "%forward = call(%x) {fn = @stage0.forward} : f32[4,4]@0",
        "%forward.1 = call(%forward) {fn = @stage1.forward} : f32[4,4]@1",
        "%forward.2 = call(%forward.1) {fn = @stage2.forward} : f32[4,4]@2",
        "return(%forward.2) {at = {0..2}}",
    ]
    assert [str(p.type) for p in trace.module.program.params] == ["f32[4,4]@{0..2}"]
    assert set(trace.bodies) == {f"stage{i}.forward" for i in range(3)}
    assert len(trace.guards) == 3
    assert parse_module(format_module(trace.module)) == trace.module


def test_every_op_says_where_the_user_asked_for_it(bench: Bench) -> None:
    actors = stages(bench)

    def step(x: Any) -> Any:
        h = actors[0].forward(x)
        return h + 1

    trace = bench.trace(step, X)
    first, second = trace.module.program.ops[:2]
    line = step.__code__.co_firstlineno
    assert first.loc is not None
    assert second.loc is not None
    assert (first.loc.file, first.loc.line, first.loc.function) == (__file__, line + 1, "step")
    assert second.loc.line == line + 2


def test_a_method_is_traced_once_for_each_signature(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any, y: Any) -> Any:
        outs = [first.forward(x) for _ in range(5)]
        return outs[0], first.forward(y), first.forward(x)

    trace = bench.trace(step, X, torch.ones(2, 4))
    assert bench.tracer.traced == ["stage0.forward", "stage0.forward.1"]
    assert calls(trace) == ["stage0.forward"] * 5 + ["stage0.forward.1", "stage0.forward"]


def test_static_arguments_are_part_of_the_signature(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        a = first.several({"in": x}, 2.0)
        b = first.several({"in": x}, 2)
        c = first.several({"in": x}, scale=2.0, options=("k", None))
        d = first.several({"in": x}, 2.0)
        e = first.several({"in": x}, 0.0), first.several({"in": x}, -0.0)
        return a, b, c, d, e

    trace = bench.trace(step, X)
    names = [f"stage0.several{s}" for s in ("", ".1", ".2", "", ".3", ".4")]
    assert calls(trace) == names


def test_results_keep_their_pytree_and_static_leaves(bench: Bench) -> None:
    first, *_ = stages(bench)
    seen = []

    def step(x: Any) -> Any:
        result = first.several({"in": x})
        again = first.several({"in": x})
        seen.append((result, again))
        return result["b"][0]

    bench.trace(step, X)
    (result, again) = seen[0]
    assert result["b"][1:] == [None, "text", 7]
    assert result["b"] is not again["b"]
    assert result["a"] is not again["a"]


def test_a_method_that_returns_nothing_gives_a_unit(bench: Bench) -> None:
    first, *_ = stages(bench)
    seen = []

    def step(x: Any) -> Any:
        seen.append(first.update())
        return x

    trace = bench.trace(step, X)
    assert seen == [None]
    assert text(trace) == [
        "%update = call() {fn = @stage0.update} : unit@0",
        "return(%x) {at = {0..2}}",
    ]
    before = float(first.local.count)
    assert tuple(trace.bodies["stage0.update"]()) == (None,)
    assert float(first.local.count) == before + 1


def test_handles_can_be_called_and_static_methods_too(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        return first.double(first(x))

    assert calls(bench.trace(step, X)) == ["stage0.call", "stage0.double"]


def test_objects_travel_between_actors(bench: Bench) -> None:
    first, second, _ = stages(bench)

    def step(word: Any) -> Any:
        return second.say({"words": [first.say(word)]})

    trace = bench.trace_at(step, (OBJECT,), inputs=Place.of(0), outputs=Place.of(0))
    assert text(trace) == [
        "%say = call(%word) {fn = @stage0.say} : object@0",
        "%say.1 = call(%say) {fn = @stage1.say} : object@1",
        "return(%say.1) {at = {0}}",
    ]
    assert str(trace.module.program.params[0].type) == "object@0"


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


def test_no_grad_is_part_of_the_signature(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        a = first.forward(x)
        with torch.no_grad():
            b = first.forward(x)
        assert a.requires_grad
        assert not b.requires_grad
        return a, b

    assert calls(bench.trace(step, X)) == ["stage0.forward", "stage0.forward.1"]


def test_microbatches_mark_ops_and_cut_views(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any, y: Any) -> Any:
        outs = []
        for batch, nothing in microbatches((Batch(x, y), None), 2):
            assert nothing is None
            outs.append(first.forward(batch.tokens) + batch.labels)
        return torch.cat(outs)

    trace = bench.trace(step, X, X)
    assert text(trace)[:5] == [
        "%x.1 = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,4]@{0..2}",
        "%y.1 = view(%y) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,4]@{0..2}",
        "%forward = call(%x.1) {fn = @stage0.forward, mb = 0} : f32[2,4]@0",
        "%add = call(%forward, %y.1) {fn = @torch.add, mb = 0} : f32[2,4]@0",
        "%x.2 = view(%x) {dim = 0, length = 2, mb = 1, start = 2} : f32[2,4]@{0..2}",
    ]
    assert [op.mb for op in trace.module.program.ops] == [0] * 4 + [1] * 4 + [None] * 2


def test_leaving_a_loop_over_microbatches_ends_the_microbatch(bench: Bench) -> None:
    def step(x: Any) -> Any:
        for part in microbatches(x, 4):
            first = part + 1
            break
        again = x + 1
        for part in microbatches(x, 2):
            again = again[:2] + part
        return first, again

    ops = bench.trace(step, X).module.program.ops
    assert [op.mb for op in ops] == [0, 0, None, 0, 0, 0, 1, 1, 1, None]


def test_a_value_that_needs_a_gradient_is_cut_by_a_torch_function(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        return list(microbatches(first.forward(x), 2))

    trace = bench.trace(step, X)
    assert calls(trace) == ["stage0.forward", "torch.narrow", "torch.narrow.1"]


def test_inputs_are_named_after_parameters(bench: Bench) -> None:
    def step(x: Any, *rest: Any, batch: Any, n: int = 3, **more: Any) -> Any:
        return x

    batch = Batch(X, {"key": [X, X]})
    trace = bench.trace(step, X, X, (X, 1), batch=batch, extra=X)
    assert [param.name for param in trace.module.program.params] == [
        *("x", "rest.0", "rest.1.0", "batch.tokens", "batch.labels.key.0", "batch.labels.key.1"),
        "extra",
    ]


def test_several_threads_of_values_keep_unique_names(bench: Bench) -> None:
    def step(x: Any, add: Any) -> Any:
        return x + add, x + add

    trace = bench.trace(step, X, X)
    assert text(trace)[:2] == [
        "%add.1 = call(%x, %add) {fn = @torch.add} : f32[4,4]@{0..2}",
        "%add.2 = call(%x, %add) {fn = @torch.add} : f32[4,4]@{0..2}",
    ]


def test_live_state_may_be_used_until_the_actor_is_written(bench: Bench) -> None:
    first, second, _ = stages(bench)

    def step(x: Any) -> Any:
        weight = first.weight()
        second.update()
        h = x @ weight
        first.update()
        return h, first.weight()

    bench.trace(step, X)


def test_a_repeated_or_unchanged_input_may_be_returned(bench: Bench) -> None:
    trace = bench.trace(lambda x: (x, [x, x + 0, x]), X)
    assert text(trace)[-1] == "return(%x, %x, %add, %x) {at = {0..2}}"


def test_seeds_set_before_the_step_are_kept(bench: Bench) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    bench.trace(lambda x: x + torch.rand(4), X)
    assert torch.equal(before, torch.get_rng_state())


def test_steps_are_not_traced_inside_steps(bench: Bench) -> None:
    def inner(x: Any) -> Any:
        return x

    def step(x: Any) -> Any:
        return bench.trace(inner, X)

    with pytest.raises(Exception, match="step step is traced inside another step"):
        bench.trace(step, X)


def test_the_place_of_inputs_must_exist(bench: Bench) -> None:
    with pytest.raises(Exception, match=r"outputs of step step at rank 7, but .* ranks 0..2"):
        trace_step(
            lambda x: x,
            (X,),
            {},
            peers=bench.peers,
            outputs=Place.of(7),
            name="step",
            tracer=bench.tracer,
        )


def test_a_failing_step_leaves_no_trace_in_progress(bench: Bench) -> None:
    def step(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bench.trace(step, X)
    refusal(bench, lambda x: bool(x), X)
    assert bench.trace(lambda x: x, X).module.program.ops
    assert torch.ones(2).sum().item() == 2
