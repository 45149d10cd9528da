"""Collectives over values of actors: recorded as ops, and defined on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cg.ir.ops import Collective
from cg.tracer.errors import TraceError
from cg.tracer.record.intrinsics.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from cg.tracer.record.intrinsics.gradients import backward

from .step_tools import Bench, Opaque, PlainStage, calls, line_of, opaque, refusal, text


class Part(PlainStage):
    def plain(self, x: Any) -> Any:
        return x * 2

    def reads(self, x: Any) -> Any:
        return x + 1

    @opaque
    def thing(self, x: Any) -> Any:
        return Opaque()


X = torch.ones(4, 4)


@pytest.fixture
def bench() -> Bench:
    return Bench(3)


def parts(bench: Bench, ranks: tuple[int, ...] = (0, 2)) -> list[Any]:
    actor: Any = bench.actor(type("Part", (Part,), {}))
    return [actor.on(rank)() for rank in ranks]


def recorded(bench: Bench, collective: Callable[[Any], Any]) -> list[str]:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        left, right = collective([a.plain(x), b.plain(x)])
        return a.reads(left), b.reads(right)

    return text(bench.trace(step, X))[2:-1]


def test_all_reduce(bench: Bench) -> None:
    assert recorded(bench, lambda v: all_reduce(v, op="avg")) == [
        "%all_reduce = all_reduce(%plain, %plain.1) {group = {0,2}, op = avg} : f32[4,4]@{0,2}",
        "%reads = call(%all_reduce) {fn = @part0.reads} : f32[4,4]@0",
        "%reads.1 = call(%all_reduce) {fn = @part1.reads} : f32[4,4]@2",
    ]


def test_all_gather(bench: Bench) -> None:
    assert recorded(bench, lambda v: all_gather(v, dim=-1))[0] == (
        "%all_gather = all_gather(%plain, %plain.1) {dim = 1, group = {0,2}} : f32[4,8]@{0,2}"
    )


def test_reduce_scatter(bench: Bench) -> None:
    assert recorded(bench, lambda v: reduce_scatter(v, op="max")) == [
        "%reduce_scatter, %reduce_scatter.1 = reduce_scatter(%plain, %plain.1) "
        "{dim = 0, group = {0,2}, op = max} : f32[2,4]@0, f32[2,4]@2",
        "%reads = call(%reduce_scatter) {fn = @part0.reads} : f32[2,4]@0",
        "%reads.1 = call(%reduce_scatter.1) {fn = @part1.reads} : f32[2,4]@2",
    ]


def test_all_to_all(bench: Bench) -> None:
    assert recorded(bench, lambda v: all_to_all(v, dim=1))[0] == (
        "%all_to_all, %all_to_all.1 = all_to_all(%plain, %plain.1) "
        "{dim = 1, group = {0,2}} : f32[4,4]@0, f32[4,4]@2"
    )


def test_broadcast(bench: Bench) -> None:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        left, right = broadcast(a.plain(x), [b, a])
        one, *_ = broadcast(b.plain(x), [a])
        same, *_ = broadcast(x, [a, b])
        return left, right, one, same

    assert text(bench.trace(step, X))[1:4] == [
        "%broadcast = broadcast(%plain) {group = {2,0}, root = 0} : f32[4,4]@{2,0}",
        "%plain.1 = call(%x) {fn = @part1.plain} : f32[4,4]@2",
        "%broadcast.1 = broadcast(%plain.1) {group = {2,0}, root = 2} : f32[4,4]@{2,0}",
    ]


def test_gather(bench: Bench) -> None:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        whole = gather([a.plain(x), b.plain(x)], root=b, dim=-1)
        return b.reads(whole)

    assert text(bench.trace(step, X))[2:4] == [
        "%gather, %gather.1 = gather(%plain, %plain.1) "
        "{dim = 1, group = {0,2}, root = 2} : unit@0, f32[4,8]@2",
        "%reads = call(%gather.1) {fn = @part1.reads} : f32[4,8]@2",
    ]


def test_scatter(bench: Bench) -> None:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        right, left = scatter(a.plain(x), [b, a])
        return a.reads(left), b.reads(right)

    assert text(bench.trace(step, X))[1:4] == [
        "%scatter, %scatter.1 = scatter(%plain) "
        "{dim = 0, group = {2,0}, root = 0} : f32[2,4]@2, f32[2,4]@0",
        "%reads = call(%scatter.1) {fn = @part0.reads} : f32[2,4]@0",
        "%reads.1 = call(%scatter) {fn = @part1.reads} : f32[2,4]@2",
    ]


def test_roots_elsewhere_let_the_definition_be_recorded(bench: Bench) -> None:
    a, b = parts(bench)
    (c,) = parts(bench, (1,))

    def step(x: Any) -> Any:
        values = [a.plain(x), b.plain(x)]
        parts = [*scatter(c.plain(x), [a, b]), *scatter(x, [a, b]), *scatter(values[0], [a, a])]
        return gather(values, root=c), parts, scatter(values[0], [a])

    trace = bench.trace(step, X)
    assert not any(isinstance(op, Collective) for op in trace.module.program.ops)
    assert "torch.cat" in calls(trace)


def test_results_are_written_to_one_by_one(bench: Bench) -> None:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        left, right = all_reduce([a.plain(x), b.plain(x)])
        left += 1
        return left, right

    assert text(bench.trace(step, X))[-1] == "return(%add_, %all_reduce) {at = {0..2}}"


@pytest.mark.parametrize("ranks", [(0, 0), (1,)])
def test_on_one_rank_the_definition_is_recorded(bench: Bench, ranks: tuple[int, ...]) -> None:
    actors = parts(bench, ranks)

    def step(x: Any) -> Any:
        values = [actor.plain(x) for actor in actors]
        return all_reduce(values), all_gather(values), reduce_scatter(values), all_to_all(values)

    trace = bench.trace(step, X)
    assert not any(isinstance(op, Collective) for op in trace.module.program.ops)
    assert "torch.cat" in calls(trace)


def test_gradients_go_through_collectives(bench: Bench) -> None:
    a, b = parts(bench)

    def step(x: Any) -> Any:
        left, right = all_reduce([a.forward(x), b.plain(x)])
        assert left.requires_grad
        loss = (left * right).sum()
        backward(loss)
        return loss

    trace = bench.trace(step, X)
    forward = trace.module.program.ops[0]
    assert trace.module.vjps["part0.forward.vjp"].grad_outputs == (0,)
    assert str(getattr(forward, "vjp", None)) == "@part0.forward.vjp"
    assert getattr(trace.module.program.ops[1], "vjp", None) is None


def test_errors(bench: Bench) -> None:
    a, b = parts(bench)
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: all_reduce([]), "cg.all_reduce of no values"),
        (lambda x: all_reduce([a.plain(x), X]), "of a Tensor, which is not a tensor of the step"),
        (
            lambda x: all_reduce([a.plain(x), b.plain(x[:2])]),
            r"value 0 is float32\[4,4\], value 1 is float32\[2,4\]",
        ),
        (
            lambda x: all_reduce([x], op="xor"),
            "op='xor'.*\n.*\n.*op is one of 'sum', 'avg', 'prod'",
        ),
        (lambda x: all_reduce([x.long()], op="avg"), "op='avg' of tensors that are not floating"),
        (lambda x: all_gather([x, x], dim=2), "along dimension 2 of a tensor with 2"),
        (
            lambda x: reduce_scatter([x[:3], x[:3]]),
            "divides dimension 0, of size 3, among 2 ranks",
        ),
        (lambda x: all_reduce([3, x]), "cg.all_reduce of a int, which is not a tensor"),  # type: ignore[list-item]
        (lambda x: gather([], root=a), "cg.gather of no values"),
        (lambda x: gather([x], root=1), "cg.gather to something other than actors.*\n.*\n.*root=a"),  # type: ignore[arg-type]
        (lambda x: gather([x, x], root=a, dim=2), "along dimension 2 of a tensor with 2"),
        (lambda x: gather([x, 3], root=a), "cg.gather of a int, which is not a tensor"),  # type: ignore[list-item]
        (
            lambda x: scatter(x, []),
            "cg.scatter to something other.*\n.*\n.*at least one",
        ),
        (lambda x: scatter(x, [a, 1]), "cg.scatter to something other than actors"),  # type: ignore[list-item]
        (lambda x: scatter(x[:3], [a, b]), "divides dimension 0, of size 3, among 2 ranks"),
        (lambda x: scatter(3, [a, b]), "cg.scatter of a int, which is not a tensor"),  # type: ignore[arg-type]
        (lambda x: broadcast(x, []), "cg.broadcast to something other than actors"),
        (lambda x: broadcast(3, [a]), "cg.broadcast of a int, which is not a tensor of the step"),  # type: ignore[arg-type]
    ]
    for step, message in cases:
        with pytest.raises(TraceError, match=message):
            raise refusal(bench, step, X)


def test_objects_are_not_combined(bench: Bench) -> None:
    a, b = parts(bench)
    for collective in (all_reduce, all_gather, reduce_scatter, all_to_all):
        error = refusal(bench, lambda x, c=collective: c([a.thing(x), b.thing(x)]), X)
        assert error.reason.startswith(f"cg.{collective.__name__} of %thing, an object that is")
        assert "collectives are of tensors" in error.reason
        assert "@cg.opaque(fake=" in error.remedy
        assert line_of(error).startswith("error = refusal(bench, lambda x, c=collective")
    error = refusal(bench, lambda x: gather([a.thing(x)], root=a), X)
    assert error.reason.startswith("cg.gather of %thing, an object that is known")
    error = refusal(bench, lambda x: scatter(a.thing(x), [a, b]), X)
    assert error.reason.startswith("cg.scatter of %thing, an object that is known")
    error = refusal(bench, lambda x: broadcast(a.thing(x), [a, b]), X)
    assert error.reason.startswith("cg.broadcast of %thing, an object that is known")


def test_definitions() -> None:
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 0.0]])
    for op, expected in (
        ("sum", a + b),
        ("avg", (a + b) / 2),
        ("prod", a * b),
        ("min", torch.minimum(a, b)),
        ("max", torch.maximum(a, b)),
    ):
        left, right = all_reduce([a, b], op)
        assert torch.equal(left, expected)
        assert torch.equal(right, expected)
        assert left is not right
    assert torch.equal(all_gather([a, b], 1)[1], torch.cat([a, b], 1))
    assert [x.tolist() for x in reduce_scatter([a, b])] == [[[6.0, 8.0]], [[10.0, 4.0]]]
    assert [x.tolist() for x in all_to_all([a, b])] == [
        [[1.0, 2.0], [5.0, 6.0]],
        [[3.0, 4.0], [7.0, 0.0]],
    ]
    bench = Bench(2)
    both = parts(bench, (0, 1))
    assert torch.equal(gather([a, b], both[0], 1), torch.cat([a, b], 1))
    assert [x.tolist() for x in scatter(a, both)] == [[[1.0, 2.0]], [[3.0, 4.0]]]
    assert [x.tolist() for x in broadcast(a, parts(bench, (0, 1)))] == [a.tolist()] * 2
