"""Records of a traced step: calls of methods, microbatches, places, names."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from cg.ir.phases import Phase
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.types import Place
from cg.tracer.record.intrinsics.microbatches import microbatches
from cg.tracer.record.step import trace_step
from cg.tracer.values.values import OBJECT

from .step_tools import Bench, PlainStage, calls, refusal, text, writes


class Batch(NamedTuple):
    tokens: Any
    labels: Any


class CountingStage(PlainStage):
    """Counts its updates, and has methods of several signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def several(self, x: Any, scale: float = 1.0, *, options: Any = None) -> Any:
        return {"a": x["in"] * scale, "b": [x["in"] + 1, None, "text", 7]}

    @writes
    def update(self) -> None:
        self.count.add_(1)

    @staticmethod
    def double(x: Any) -> Any:
        return x * 2


@pytest.fixture
def bench() -> Bench:
    return Bench(3)


def stages(bench: Bench) -> list[Any]:
    return bench.stages(CountingStage, range(3))


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

    def step(x: Any) -> Any:
        result = first.several({"in": x})
        again = first.several({"in": x})
        assert result["b"][1:] == [None, "text", 7]
        assert result["b"] is not again["b"]
        assert result["a"] is not again["a"]
        return result["b"][0]

    bench.trace(step, X)


def test_a_method_that_returns_nothing_gives_a_unit(bench: Bench) -> None:
    first, *_ = stages(bench)

    def step(x: Any) -> Any:
        assert first.update() is None
        return x

    trace = bench.trace(step, X)
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
