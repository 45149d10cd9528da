"""Errors of steps that misuse actors and their results: each names the line and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cg.tracer.errors import TraceError
from cg.tracer.record.intrinsics.gradients import backward
from cg.tracer.record.intrinsics.microbatches import mean, microbatches

from .step_tools import Bench, PlainStage, line_of, opaque, refusal

X = torch.ones(4, 4)
REAL = torch.ones(4, 4)
MODULE = torch.nn.Linear(4, 4)
ARRAY = np.ones((4, 4))


class MisusedStage(PlainStage):
    """Methods that a step or a method may not use so."""

    def pair(self, x: Any) -> Any:
        y = x * 1
        return y, y[0]

    def fails(self, x: Any) -> Any:
        raise ValueError("no such thing")

    def calls(self, other: Any, x: Any) -> Any:
        return other.forward(x)

    def returns(self, x: Any) -> Any:
        return lambda: x

    def loops(self, x: Any) -> Any:
        return list(microbatches(x, 2))

    @opaque
    def keep(self, x: Any) -> Any:
        return x * 2


@pytest.fixture
def bench() -> Bench:
    return Bench(2)


def stage(bench: Bench) -> Any:
    return bench.stages(MisusedStage)[0]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def test_writes_that_others_would_see(bench: Bench) -> None:
    first = stage(bench)

    def inputs(x: Any) -> Any:
        x += 1

    def part_of_input(x: Any) -> Any:
        for part in microbatches(x, 2):
            part[0] = 0

    def view(x: Any) -> Any:
        h = x + 1
        row = h[0]
        row += 1
        return h

    def base(x: Any) -> Any:
        h = x + 1
        row = h[0]
        h += 1
        return row

    def siblings(x: Any) -> Any:
        a, b = first.pair(x)
        b += 1
        return a

    def kept(x: Any) -> Any:
        h = x + 1
        first.say(h)
        h += 1

    def given(x: Any) -> Any:
        h = first.keep(x + 1)
        h += 1

    def state(x: Any) -> Any:
        w = first.weight()
        w.mul_(2)

    for step, message in (
        (inputs, r"add_\(\) writes to %x, and it is an input of the step, which the caller holds"),
        (part_of_input, r"an assignment to an index writes to %x.1, and it is an input"),
        (view, r"add_\(\) writes to %getitem, which is a view of another value or has views"),
        (base, r"add_\(\) writes to %add, which is a view of another value or has views"),
        (siblings, r"add_\(\) writes to %pair.1, which is a view of another value or has views"),
        (kept, r"%add, and the opaque method @stage0.say may have kept it"),
        (given, r"%keep, and the opaque method @stage0.keep may have kept it"),
        (state, r"mul_\(\) writes to %weight, and it is state of the actor stage0"),
    ):
        error = refusal(bench, step, X)
        with pytest.raises(TraceError, match=message):
            raise error
        assert "made by .clone()" in error.remedy


def test_a_write_under_no_grad_would_lose_the_gradient(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        with torch.no_grad():
            h *= 2

    error = refusal(bench, step, X)
    assert "writes to %forward, which requires a gradient, under torch.no_grad" in error.reason


def test_live_state_after_a_write(bench: Bench) -> None:
    first = stage(bench)

    def used(x: Any) -> Any:
        w = first.weight()
        first.update()
        return x @ w

    def view_used(x: Any) -> Any:
        w = first.weight()[0]
        first.update()
        return x @ w

    def returned(x: Any) -> Any:
        w = first.weight()
        first.update()
        return w

    for step in (used, view_used):
        error = refusal(bench, step, X)
        assert "is state of stage0 itself, and stage0 has been written to since" in error.reason
        assert ".clone()" in error.remedy
        assert line_of(error) == "return x @ w"
    with pytest.raises(TraceError, match="%weight is state of stage0 itself"):
        bench.trace(returned, X)


def test_arguments_of_methods(bench: Bench) -> None:
    first, second = stage(bench), stage(bench)
    for step, message in (
        (lambda x: first.forward(REAL), r"stage0.forward takes a real tensor, float32\[4,4\]"),
        (lambda x: first.forward(MODULE.weight), r"stage0.forward takes a parameter of a module"),
        (lambda x: first.forward({"a": [ARRAY]}), r"stage0.forward takes a numpy array"),
        (lambda x: first.calls(second, x), r"takes <actor stage1: .*>, an actor, which is not"),
        (lambda x: first.calls(second.forward, x), r"<method stage1.forward>, a method of an act"),
    ):
        with pytest.raises(TraceError, match=message):
            raise refusal(bench, step, X)


def test_what_a_method_raises_names_its_line(bench: Bench) -> None:
    first = stage(bench)
    with pytest.raises(TraceError, match=r"@stage0.fails raised ValueError .*: no such thing") as e:
        bench.trace(lambda x: first.fails(x), X)
    assert isinstance(e.value.__cause__, ValueError)
    assert line_of(e.value) == 'raise ValueError("no such thing")'


def test_methods_cannot_do_what_belongs_into_the_step(bench: Bench) -> None:
    first, second = stage(bench), stage(bench)
    first.local.other = second

    def through(self: Any, x: Any) -> Any:
        return self.other.forward(x)

    first.cls.through = through
    error = refusal(bench, lambda x: first.through(x), X)
    assert error.reason == "a call of stage1.forward inside the traced function @stage0.through"
    assert line_of(error) == "return self.other.forward(x)"
    error = refusal(bench, lambda x: first.loops(x), X)
    assert error.reason == "cg.microbatches inside the traced function @stage0.loops"


def test_results_that_other_ranks_cannot_be_told_of(bench: Bench) -> None:
    first = stage(bench)
    error = refusal(bench, lambda x: first.returns(x), X)
    assert "@stage0.returns returns something besides tensors" in error.reason
    assert "@cg.opaque" in error.remedy


def test_objects_are_opaque_to_the_step(bench: Bench) -> None:
    first = stage(bench)
    uses: list[tuple[Callable[[Any], Any], str]] = [
        (lambda o: o.length, "attribute 'length' of %say"),
        (lambda o: bool(o), "a decision on %say"),
        (lambda o: len(o), "the length of %say"),
        (lambda o: list(o), "iteration over %say"),
        (lambda o: 3 in o, "a search in %say"),
        (lambda o: o[0], "an element of %say"),
        (lambda o: o.__setitem__(0, 1), "a write to %say"),
        (lambda o: o(1), "a call of %say"),
        (lambda o: str(o), "the text of %say"),
        (lambda o: f"{o}", "the text of %say"),
        (lambda o: o == "x", "a comparison with %say"),
        (lambda o: o != "x", "a comparison with %say"),
        (lambda o: o + 1, "arithmetic with %say"),
        (lambda o: 1 + o, "arithmetic with %say"),
        (lambda o: int(o), "arithmetic with %say"),
    ]
    for use, message in uses:
        error = refusal(bench, lambda x, use=use: use(first.say(x)), X)
        assert error.reason.startswith(message), error.reason
        assert "known only when the step runs" in error.reason
        assert error.remedy.endswith("do it in an actor's method that takes the object")
        parts = message.startswith(("attribute", "iteration", "an element"))
        assert ("@cg.opaque(returns=2)" in error.remedy) is parts
    error = refusal(bench, lambda x: torch.nn.functional.mse_loss(x, first.say(x)), X)
    assert "mse_loss() takes <value %say of a traced step: object@0>, an object" in error.reason
    for use, message in ((backward, "cg.backward of %say"), (lambda o: mean([o]), "cg.mean of %")):
        error = refusal(bench, lambda x, use=use: use(first.say(first.say(x))), X)
        assert error.reason.startswith(message)
        assert "known only when the step runs" in error.reason
        assert error.remedy.startswith("@stage0.say returns an object, since it is called as it is")


def test_what_a_step_returns_must_have_been_made(bench: Bench) -> None:
    first = stage(bench)
    for step, message in (
        (lambda x: [x, REAL], "step step returns a real tensor that nothing in the step has made"),
        (lambda x: first, "step step returns <actor stage0: .*>, an actor, which is not a value"),
        (lambda x: first.forward, "step step returns <method stage0.forward>, a method of an act"),
        (lambda x: {"a": object()}, "step step returns a object, which nothing in the step has"),
        (lambda x: (y for y in [x]), "step step returns a generator, which nothing in the step"),
    ):
        with pytest.raises(TraceError, match=message):
            raise refusal(bench, step, X)


def test_autograd_functions_are_seen(bench: Bench) -> None:
    first = stage(bench)
    error = refusal(bench, lambda x: Square.apply(first.forward(x)) + 1, X)
    assert "%mul came out of a torch.autograd.Function" in error.reason
    assert error.remedy == "apply the autograd function in an actor's method"


def test_autocast_does_not_reach_into_methods(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return first.forward(x)

    error = refusal(bench, step, X)
    assert error.reason.startswith("stage0.forward is called under torch.autocast")
    assert error.remedy == "enter autocast inside the actor's method"

    def torch_function(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    assert "matmul() is called under torch.autocast" in refusal(bench, torch_function, X).reason


def test_backward_of_what_is_no_loss(bench: Bench) -> None:
    first = stage(bench)
    need = torch.ones(4, 4, requires_grad=True)

    def twice(x: Any) -> Any:
        h = first.forward(x)
        backward(h.sum())
        backward((h * 2).sum())

    def detached(x: Any) -> Any:
        backward(first.forward(x).detach().sum())

    def through_opaque(x: Any) -> Any:
        h = first.keep(first.forward(x))
        backward((h * first.forward(x)).sum())

    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: backward(first.forward(x)), r"%forward, which is f32\[4,4\]@0 and not a real"),
        (lambda x: backward(x.sum()), "%sum, which does not depend on anything that requires"),
        (lambda x: backward(3.0), "cg.backward of a float, which is not a tensor of the step"),  # type: ignore[arg-type]
        (lambda x: backward(REAL.sum), "cg.backward of a builtin_function_or_method"),  # type: ignore[arg-type]
        (lambda x: backward(), "cg.backward of no loss"),
        (twice, "cg.backward goes a second time through the call of .*, first at .*"),
        (detached, "%sum, which does not depend on anything that requires a gradient"),
        (through_opaque, r"what the opaque method @stage0.keep made of values that require gradi"),
    ]
    for step, message in cases:
        with pytest.raises(TraceError, match=message):
            raise refusal(bench, step, X)
    with pytest.raises(TraceError, match="reaches %x, an input of the step that requires a grad"):
        raise refusal(bench, lambda x: backward((first.forward(x) * x).sum()), need)


def test_actors_of_another_world(bench: Bench) -> None:
    (other,) = Bench(2).stages(MisusedStage, [1])
    error = refusal(bench, lambda x: other.forward(x), X)
    assert error.reason.startswith("stage0 was made in another world")
