"""Graphs that one rank drives: values, and the order of their effects."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cg

from ..sampling import scaled
from .graph_tools import Scale, Worker, chain_of, world


class Batch(NamedTuple):
    """A pytree with attributes."""

    x: Any
    scale: Any


def test_an_object_goes_through_a_chain() -> None:
    with world(4):
        graph, _ = chain_of(3)
        for value in ("hello", b"x", None, 3, {"a": [1, 2]}, np.arange(4), torch.ones(2)):
            got = graph.execute(value).result(timeout=60)
            assert type(got) is type(value)
            assert np.array_equal(got, value)
        graph.close()


def test_results_in_any_order_or_never() -> None:
    with world(4) as executions:
        graph, _ = chain_of(3, max_inflight=4)
        futures = [graph.execute(i) for i in range(4)]
        assert [futures[i].result() for i in (2, 0, 3, 1)] == [2, 0, 3, 1]
        dropped = [weakref.ref(graph.execute(i)) for i in range(50)]
        assert graph.execute("last").result() == "last"
        gc.collect()
        assert [ref() for ref in dropped] == [None] * 50
        assert executions.is_idle
        assert futures[1].result() == 1  # as often as one likes


def test_positional_keyword_and_nested_inputs() -> None:
    with world(3):
        one, other = Worker.on(1)("one"), Worker.on(2)("other")

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, *, batch, options):
            joined = one.join(x, [batch.x, {"deep": x}], scale=batch.scale, fixed=3)
            return {"joined": joined, "again": other.join(joined, mode=options["mode"]), "k": 5}

        lowered = step.lower(
            cg.object, batch=Batch(cg.object, cg.object), options={"mode": cg.object}
        )
        graph = lowered.compile()
        got = graph.execute(1, batch=Batch(2, 3), options={"mode": "m"}).result()
        joined = ("one", (1, [2, {"deep": 1}]), {"scale": 3, "fixed": 3})
        assert got == {"joined": joined, "again": ("other", (joined,), {"mode": "m"}), "k": 5}
        with pytest.raises(cg.InputError, match="missing a required argument: 'x'"):
            graph.execute(batch=Batch(2, 3), options={"mode": "m"})
        with pytest.raises(cg.InputError, match="too many positional arguments"):
            graph.execute(1, 2, batch=Batch(2, 3), options={"mode": "m"})
        assert graph.execute(2, batch=Batch(2, 3), options={"mode": "m"}).result()["k"] == 5


def test_tuples_are_unpacked_and_a_wrong_number_is_an_error() -> None:
    with world(3):
        source, left, right = Worker.on(1)(), Worker.on(2)("l"), Worker.on(0)("r")

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            one, other = source.two(x)
            return left.join(one), right.join(other), one

        graph = step.lower(cg.object).compile()
        assert graph.execute(4).result() == (("l", (4,), {}), ("r", ([4],), {}), 4)
        with pytest.raises(TypeError, match="returned a tuple of 3"):
            graph.execute("three").result()
        assert graph.execute(5).result()[2] == 5


def test_a_value_is_read_many_times_on_one_actor() -> None:
    with world(3):
        one, other = Worker.on(1)("a"), Worker.on(2)("b")

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            y = one.echo(x)
            return other.join(y, y, x), one.join(y), other.echo(y), y

        graph = step.lower(cg.object).compile()
        for i in range(5):
            assert graph.execute(i).result() == (("b", (i, i, i), {}), ("a", (i,), {}), i, i)


def test_outputs_elsewhere_and_effects_alone() -> None:
    with world(3):
        one, other = Worker.on(1)(), Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(2))
        def elsewhere(x):
            one.note(x)
            return other.add(x)

        graph = elsewhere.lower(cg.object).compile()
        assert [graph.execute(i).result() for i in range(5)] == [None] * 5
        assert one.local.log == list(range(5))
        assert other.local.total == 10


def test_tensors_through_traced_and_opaque_methods_are_the_callers_own() -> None:
    with world(3):
        scale, worker = Scale.on(1)(3.0), Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return worker.shaped(scale(x)), scale(x)

        graph = step.lower(torch.zeros(2, 3)).compile(max_inflight=2)
        kept = [graph.execute(torch.full((2, 3), float(i))).result() for i in range(1, 9)]
        for i, (doubled, scaled) in enumerate(kept, 1):
            assert torch.equal(doubled, torch.full((2, 3), 6.0 * i))
            assert torch.equal(scaled, torch.full((2, 3), 3.0 * i))


def test_state_follows_the_order_of_execute() -> None:
    with world(3):
        scale, worker = Scale.on(1)(), Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return scale.count(x), worker.note(x)

        graph = step.lower(torch.zeros(1)).compile(max_inflight=3)
        futures = [graph.execute(torch.zeros(1)) for _ in range(7)]
        got = [(future.result()[0].item(), future.result()[1]) for future in reversed(futures)]
        assert got == [(float(n), n) for n in range(7, 0, -1)]


def test_many_graphs_over_the_same_actors() -> None:
    with world(3):
        one, other = Worker.on(1)(), Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def forth(x):
            return other.note((1, one.note(x)))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def back(x):
            return one.note((2, other.note(x)))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def only(x):
            return one.note(x)

        graphs = [step.lower(cg.object).compile() for step in (forth, back, only)]
        for _ in range(4):
            for graph in graphs:
                graph.execute("x")
        graphs[1].close()
        assert graphs[0].execute("y").result() == 9
        assert graphs[2].execute("z").result() == 14
        one_log = ["x", (2, 2), "x"]
        assert [e for e in one.local.log if e == "x"] == ["x"] * 8
        assert one.local.log[:3] == one_log
        assert other.local.log[:4] == [(1, 1), "x", (1, 4), "x"]


def test_a_carried_value() -> None:
    with world(3):
        scale = Scale.on(2)(3.0)
        tensor, thing = cg.carry(torch.ones(2), on=1), cg.carry(("start",), on=2)
        worker = Worker.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            before = tensor.get()
            tensor.set(scale(before) + x)
            seen = thing.get()
            thing.set(worker.echo(x))
            return before, seen

        graph = step.lower(torch.zeros(2)).compile()
        futures = [graph.execute(torch.full((2,), float(i))) for i in range(4)]
        got = [future.result() for future in futures]
        assert [before[0].item() for before, _ in got] == [1, 3, 10, 32]
        assert got[0][1] == ("start",)


@pytest.mark.parametrize("initial", [torch.zeros(2), ("start",)], ids=["tensor", "object"])
def test_what_is_carried_does_not_pass_the_driver(initial: Any) -> None:
    with world(3):
        carried = cg.carry(initial, on=1)
        worker = Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def decode(x):
            before = carried.get()
            noted = worker.note((x, before))
            carried.set(worker.renewed(before) if isinstance(before, torch.Tensor) else noted)
            return noted

        graph = decode.lower(cg.object).compile()
        # The driver sends `x` and gets what is noted; the rest is between the carry and its user.
        edges = {channel.ranks for channel in graph.module.channels.values()}
        assert edges == {(0, 2), (1, 2), (2, 1), (2, 0)}
        assert [graph.execute(i).result() for i in range(3)] == [1, 2, 3]
        seen = [before for _, before in worker.local.log]
        if isinstance(initial, torch.Tensor):
            assert [before.tolist() for before in seen] == [[0, 0], [1, 1], [2, 2]]
        else:
            assert seen == [("start",), 1, 2]


def test_rows_of_what_is_carried() -> None:
    with world(2):
        carried = cg.carry(torch.arange(8).view(4, 2), on=1)

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(rows, value):
            before = carried.get(rows)
            carried.set(value, rows)
            return before, carried.get()

        rows, value = torch.tensor([3, 1]), torch.tensor([[50, 51], [60, 61]])
        graph = step.lower(rows, value).compile()
        before, after = graph.execute(rows, value).result()
        assert before.tolist() == [[6, 7], [2, 3]]
        assert after.tolist() == [[0, 1], [60, 61], [4, 5], [50, 51]]
        with pytest.raises(
            cg.TraceError, match=r"holds torch.int64 of shape \(2, 2\), and is set to"
        ):
            step.lower(rows, value[:, 0])


def test_variants() -> None:
    with world(3):
        scale, worker = Scale.on(1)(), Worker.on(2)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x, *, mode="sum"):
            y = scale(x)
            return (worker.shaped(y) if mode == "double" else y), scale.count(torch.zeros(1))

        graph = step.lower_many(
            [torch.zeros(2), (torch.zeros(3, 4),), {"x": torch.zeros(5), "mode": "double"}]
        ).compile(max_inflight=3)
        assert len(graph.variants) == 3
        futures = [
            graph.execute(torch.ones(2)),
            graph.execute(torch.ones(3, 4)),
            graph.execute(torch.ones(5), mode="double"),
            graph.execute(mode="double", x=torch.ones(5)),
            graph.execute(torch.ones(2)),
        ]
        got = [future.result() for future in futures]
        assert [(tuple(y.shape), y.max().item()) for y, _ in got] == [
            ((2,), 2.0),
            ((3, 4), 2.0),
            ((5,), 4.0),
            ((5,), 4.0),
            ((2,), 2.0),
        ]
        assert [int(count) for _, count in got] == [1, 2, 3, 4, 5]
        with pytest.raises(cg.InputError, match=r"no variant of step was compiled for these"):
            graph.execute(torch.ones(6))
        assert graph(torch.ones(3, 4))[1].item() == 6
        with pytest.raises(ValueError, match="at least one set of arguments"):
            step.lower_many([])
        with pytest.raises(cg.InputError, match=r"entry 1 of lower_many\(\): step\(\): too many"):
            step.lower_many([torch.zeros(2), (1, 2, 3)])
        with pytest.raises(TypeError, match=r"lower_many\(\) of step takes a list .* type Tensor"):
            step.lower_many(torch.zeros(2, 3))
        # One set of channels serves all variants, each slot large enough for the largest.
        sizes = {c.ranks: c.slot_bytes for c in graph.variants[0].module.channels.values()}
        assert sizes[(0, 1)] == 3 * 4 * 4
        assert "program" in graph.as_text(1, variant=2)


def test_a_changed_actor_is_noticed() -> None:
    @cg.actor
    class Moody(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2

        def forward(self, x):
            return x * self.factor

    with world(2):
        moody = Moody.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return moody(x)

        graph = step.lower(torch.ones(1)).compile()
        assert graph.execute(torch.ones(1)).result().item() == 2
        moody.local.factor = 3
        changed = graph.execute(torch.ones(1))  # for the driver's own actors have not
        with pytest.raises(RuntimeError, match="compile the step again"):
            changed.result()
        assert graph.state_dict()["executions"] == 2
        moody.local.factor = 2
        assert graph.execute(torch.ones(1)).result().item() == 2


def test_random_numbers_do_not_depend_on_what_is_in_flight() -> None:
    def numbers(at_once: int) -> list[float]:
        with world(2):
            scale = Scale.on(1)()

            @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
            def step(x):
                return scale.noise(x)

            graph = step.lower(torch.zeros(1)).compile(max_inflight=4, seed=5)
            found: list[float] = []
            for _ in range(0, 12, at_once):
                futures = [graph.execute(torch.zeros(1)) for _ in range(at_once)]
                found += [future.result().item() for future in futures]
            return found

    one = numbers(1)
    assert numbers(4) == one
    assert len(set(one)) == 12


@settings(max_examples=scaled(60))
@given(st.data())
def test_any_interleaving_gives_what_one_after_the_other_gives(data: st.DataObject) -> None:
    """Three graphs over three actors, in random order, with random turns and random reading."""
    with world(4, shuffle=data.draw(st.integers(0, 10**6))):
        a, b, c = (Worker.on(rank)(str(rank)) for rank in (1, 2, 3))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def forth(x):
            return c.add(b.add(a.add(x)))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def back(x):
            return a.add(b.add(c.add(x)))

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def fan(x):
            return [a.add(x), b.add(x), c.add(x), a.add(x)]

        capacity = data.draw(st.integers(1, 4))
        graphs = [s.lower(cg.object).compile(max_inflight=capacity) for s in (forth, back, fan)]
        totals = [0, 0, 0]

        def add(i: int, x: int) -> int:
            totals[i] += x
            return totals[i]

        plain = [
            lambda x: add(2, add(1, add(0, x))),
            lambda x: add(0, add(1, add(2, x))),
            lambda x: [add(0, x), add(1, x), add(2, x), add(0, x)],
        ]
        waiting: list[tuple[Any, Any]] = []
        for _ in range(data.draw(st.integers(1, 15))):
            which, x = data.draw(st.integers(0, 2)), data.draw(st.integers(-5, 5))
            waiting.append((graphs[which].execute(x), plain[which](x)))
            what = data.draw(st.sampled_from(["keep", "read", "drop"]))
            if what != "keep":
                future, expected = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                if what == "read":
                    assert future.result() == expected
        for future, expected in reversed(waiting):
            assert future.result() == expected
        for graph in graphs:
            graph.close()
        assert [w.local.total for w in (a, b, c)] == totals
