"""Stored parameters, gathered for a task or for a step: values, traffic, memory, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cg
from cg.ir.attributes import Traffic
from cg.ir.ops import Call, Collective, Transfer
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.types import Mesh, promised, tensor_bytes
from cg.ir.verify.verifier import verify
from cg.passes.frontend.fsdp import Fsdp
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

from ...stages import mean_loss
from ...worlds import virtual_world
from .training import (
    WIDTH,
    Block,
    Mlp,
    Model,
    Tower,
    Written,
    batch,
    plain_step,
    step_of,
    train,
)

pytestmark = pytest.mark.timeout(600)

STORE = cg.cut(0, "dp")

_world = virtual_world(8, threads=1, scope="module")


def two(dp: int, tp: int = 1) -> tuple[Mesh, ...]:
    return cg.mesh(pp=2, dp=dp, tp=tp).unbind("pp")


def towers(**kwargs: Any) -> Model:
    return Model([(Tower, (seed, *kwargs.values())) for seed in range(2)])


# -- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fsdp", "schedule", "dp", "tp"),
    [
        pytest.param(cg.fsdp(keep="step"), "1f1b", 2, 1, marks=pytest.mark.slow),
        pytest.param(cg.fsdp(keep="task"), "zb-h1", 2, 1, marks=pytest.mark.slow),
        (cg.fsdp(keep="step", bucket="blocks.1|blocks.0.up"), "zb-h1", 2, 2),
        (cg.fsdp(keep="auto", memory=26000), "1f1b", 2, 2),
        (cg.fsdp(keep="task", prefetch=0, separate=False), "gpipe", 3, 1),
        (None, "1f1b", 3, 1),
    ],
    ids=["step", "task, split", "step, tp", "auto, tp", "task, uneven", "as it is, uneven"],
)
def test_pipelines_train_exactly(fsdp: Any, schedule: str, dp: int, tp: int) -> None:
    """Integers: sums are exact in any order."""
    width = WIDTH if dp == 2 else 5
    model = Model([(Tower, (seed, "signs", width)) for seed in range(2)])
    stages = model.on(two(dp, tp), store=STORE)
    train(model, stages, 24, 4, schedule, "integers", steps=3, width=width, fsdp=fsdp)


@pytest.mark.parametrize(("dp", "keep"), [(3, "step"), (2, "task")])
def test_layers_with_norms_and_biases_train(keep: str, dp: int) -> None:
    """Along tp some gradients are sums, which stay so when they are reduced along dp."""
    model = Model([(Written, (0, "sgd")), (Block, (1, "adam"))])
    places = (cg.mesh(dp=dp, tp=2), cg.mesh([6, 7], dp=2, tp=1))
    stages = model.on(places, store=STORE)
    train(model, stages, 12, 2, "1f1b", "reals", steps=2, fsdp=cg.fsdp(keep=keep))


def test_dimensions_packed_and_cut_otherwise_train() -> None:
    """Pieces that are no rows of what is used: of blocks, and of the second dimension."""
    plan = {
        "forward(x)|loss(h)|loss(y)": cg.cut(0, "dp"),
        "up.*": cg.cut(0, "tp", blocks=2),
        "down.weight": cg.cut(1, "tp", blocks=2),
    }
    model = Model([(Mlp, (0, "signs", 4))])
    for store in (cg.cut(0, "dp"), cg.cut(-1, "dp")):
        stages = model.on([cg.mesh(dp=2, tp=2)], [plan], store=store)
        train(model, stages, 8, 2, None, "integers", steps=2, width=4, fsdp=cg.fsdp(keep="step"))


def trained(fsdp: Any, count: int) -> list[bytes]:
    """The bytes of all parameters and losses, after two steps of floats."""
    model = Model([(Tower, (seed, "adam")) for seed in range(2)])
    stages = model.on(two(2), store=STORE)
    compiled = cg.trace(step_of(stages, count)).lower(*batch(0, 8, "reals")).compile(fsdp=fsdp)
    made = [compiled(*batch(seed, 8, "reals"))[0] for seed in range(2)]
    held = [p for s in stages for one in s.instances.values() for p in one.parameters()]
    return [tensor.detach().numpy().tobytes() for tensor in (*made, *held)]


def test_residency_and_prefetch_change_no_bits() -> None:
    usual = trained(cg.fsdp(keep="task"), 2)
    assert trained(cg.fsdp(keep="task", prefetch=3), 2) == usual
    together = cg.fsdp(keep="task", prefetch=0, separate=False, bucket="blocks")
    assert trained(together, 2) == usual
    # Sums over several microbatches are rounded in another order; of one there is nothing to sum.
    assert trained(cg.fsdp(keep="step"), 1) == trained(cg.fsdp(keep="task"), 1)


# -- traffic ---------------------------------------------------------------------------------


def traffic(module: Module, rank: int) -> tuple[Counter[Traffic], Counter[Traffic]]:
    """The numbers of collectives of a rank's program by what they are for; bytes it receives."""
    numbers: Counter[Traffic] = Counter()
    received: Counter[Traffic] = Counter()
    for op in module.program_of(rank).ops:
        if not isinstance(op, Collective) or op.chan is None:
            continue
        if (what := module.channels[op.chan].traffic) is None:
            continue
        given, made = op.operands[0].type, promised(op.result.type)
        whole, piece = sorted([tensor_bytes(given), tensor_bytes(made)], reverse=True)
        numbers[what] += 1
        received[what] += whole - piece
    return numbers, received


@pytest.mark.parametrize("count", [1, 4])
def test_traffic_is_that_of_the_closed_forms(count: int) -> None:
    """2P(f-1)/f bytes a step, or 3mP(f-1)/f; one gather and one reduction for each bucket."""
    model = Model([(Tower, (seed, "sgd")) for seed in range(2)])
    parameters = 4 * sum(p.numel() for p in model.plain()[1].parameters())
    share = parameters // 2  # f = 2
    lowered = cg.trace(step_of(model.on(two(2), store=STORE), count)).lower(*batch(0, 8, "reals"))
    module = lowered.compile(fsdp=cg.fsdp(bucket="blocks.*", keep="step")).module
    numbers, received = traffic(module, 3)
    assert numbers == {Traffic.GATHER: 2, Traffic.REDUCE: 2}
    assert sum(received.values()) == 2 * share
    module = lowered.compile(fsdp=cg.fsdp(bucket="blocks.*", keep="task")).module
    numbers, received = traffic(module, 3)
    assert numbers == {Traffic.GATHER: 2 * 2 * count, Traffic.REDUCE: 2 * count}
    assert sum(received.values()) == 3 * count * share
    costs = lowered.compile(fsdp=cg.fsdp(keep="step")).cost_analysis()[3]
    assert (costs.gathers, costs.reductions) == (2, 2)
    assert costs.bytes_gathered + costs.bytes_reduced == 2 * share


def test_large_pieces_travel_by_themselves() -> None:
    model = Model([(Tower, (0, "sgd", 512, 1))])  # pieces of 1 MiB
    stages = model.on([cg.mesh(dp=2)], [{"forward(x)|loss(h)|loss(y)": STORE}], store=STORE)
    lowered = cg.trace(step_of(stages, 1)).lower(*batch(0, 2, "reals", 512))
    numbers, _ = traffic(lowered.compile(fsdp=cg.fsdp(keep="step")).module, 0)
    assert numbers == {Traffic.GATHER: 2, Traffic.REDUCE: 2}


def test_traffics_have_communicators_of_their_own() -> None:
    model = towers()
    lowered = cg.trace(step_of(model.on(two(2, 2), store=STORE), 2)).lower(*batch(0, 8, "integers"))
    module = lowered.compile().module
    of_rank_0 = Counter(
        (channel.ranks, channel.traffic)
        for channel in module.channels.values()
        if channel.collective and 0 in channel.ranks and len(channel.ranks) == 2
    )
    assert of_rank_0[(0, 2), Traffic.GATHER] == of_rank_0[(0, 2), Traffic.REDUCE] == 1
    assert of_rank_0[(0, 1), None] == 1
    together = lowered.compile(fsdp=cg.fsdp(separate=False)).module
    assert all(channel.traffic is None for channel in together.channels.values())


# -- what ends a residency -------------------------------------------------------------------


def twice(stages: Any, change: Callable[[Any], None]) -> Callable[..., Any]:
    (stage,) = stages

    def step(x: Tensor, y: Tensor) -> Any:
        losses = []
        for _ in range(2):
            for part, target in cg.microbatches((x, y), 2):
                loss = stage.loss(stage.forward(part), target)
                cg.backward(loss)
                losses.append(loss)
            change(stage)
        return losses

    return step


@pytest.mark.parametrize("change", ["update", "shrink"])
def test_a_change_of_the_actor_ends_a_residency(change: str) -> None:
    model = Model([(Tower, (0,))])
    stages = model.on([cg.mesh(dp=2, tp=1)], store=STORE)
    step = twice(stages, lambda stage: getattr(stage, change)())
    x, y = batch(0, 8, "integers")
    compiled = cg.trace(step).lower(x, y).compile(fsdp=cg.fsdp(keep="step"))
    numbers, _ = traffic(compiled.module, 0)
    assert numbers == {Traffic.GATHER: 4, Traffic.REDUCE: 4}
    (plain,) = model.plain()
    expected = []
    for _ in range(2):
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = plain.loss(plain.forward(part), target)
            loss.backward()
            expected.append(loss.detach())
        getattr(plain, change)()
    torch.testing.assert_close(compiled(x, y), expected, rtol=0, atol=0)


# -- memory ----------------------------------------------------------------------------------


def peaks(compiled: cg.Compiled) -> list[int]:
    return [plan.peak for plan in compiled.memory_analysis()]


def test_auto_keeps_what_the_memory_of_the_tightest_member_allows() -> None:
    model = Model([(Tower, (seed, "sgd", WIDTH, 4)) for seed in range(2)])
    lowered = cg.trace(step_of(model.on(two(2), store=STORE), 4)).lower(*batch(0, 8, "reals"))
    step = lowered.compile(fsdp=cg.fsdp(keep="step"))
    task = lowered.compile(fsdp=cg.fsdp(keep="task"))
    assert max(peaks(task)) < max(peaks(step))
    most, least = (traffic(each.module, 3)[0].total() for each in (task, step))
    bound = (max(peaks(task)) + max(peaks(step))) // 2
    auto = lowered.compile(fsdp=cg.fsdp(memory=bound))
    assert max(peaks(auto)) <= bound
    assert least < traffic(auto.module, 3)[0].total() < most
    assert [p.gathered for p in step.memory_analysis()][3] >= 4 * 4 * 2 * 2 * WIDTH**2
    free = lowered.compile(fsdp=cg.fsdp())
    assert traffic(free.module, 3)[0].total() == least


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_a_step_are_one_sum_however_many_microbatches(schedule: str) -> None:
    """Each term is freed as soon as it is added, also where one loss is differentiated."""
    model = Model([(Tower, (seed, "sgd", WIDTH, 4)) for seed in range(2)])
    stages = model.on(two(2), store=STORE)

    def peak(count: int) -> int:
        def step(x: Tensor, y: Tensor) -> Any:
            loss = mean_loss(stages, (x, y), count)
            for stage in stages:
                stage.update()
            return loss

        lowered = cg.trace(step).lower(*batch(0, 2 * count, "reals"))
        order = cg.schedules.by_name(schedule)
        plans = lowered.compile(schedule=order, fsdp=cg.fsdp(keep="step")).memory_analysis()
        return max(plan.values + plan.gathered for plan in plans)

    assert peak(12) < 1.1 * peak(4)


# -- errors ----------------------------------------------------------------------------------


def lowered(store: Any = STORE) -> cg.Lowered:
    model = Model([(Tower, (0, "sgd"))])
    return cg.trace(step_of(model.on([cg.mesh(dp=2, tp=1)], store=store), 2)).lower(
        *batch(0, 4, "reals")
    )


def test_a_bucket_that_matches_nothing() -> None:
    with pytest.raises(cg.TraceError, match=r"the bucket 'layers\.\*' matches no param") as info:
        lowered().compile(fsdp=cg.fsdp(bucket="blocks.*|layers.*"))
    assert "test_fsdp.py" in str(info.value)
    assert "blocks.0.down.weight, blocks.0.up.weight" in str(info.value)


def test_a_step_without_stored_parameters() -> None:
    with pytest.raises(cg.TraceError, match="none of the methods that it traces") as info:
        lowered(cg.whole).compile(fsdp=cg.fsdp())
    assert "test_fsdp.py" in str(info.value)
    assert "store=cg.cut(0" in str(info.value)


@pytest.mark.parametrize("keep", ["auto", "step", "task"])
def test_a_memory_into_which_nothing_fits(keep: str) -> None:
    step = lowered()
    with pytest.raises(cg.TraceError, match=r"allows 100 bytes, and the program of rank") as info:
        step.compile(fsdp=cg.fsdp(keep=keep, memory=100))
    assert "test_fsdp.py" in str(info.value)
    assert ("keep='auto'" in str(info.value)) == (keep == "step")


def test_options_of_wrong_kinds() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"keep": "steps"}, ValueError, "it is one of 'step', 'task', 'auto'"),
        ({"bucket": 3}, TypeError, "a string, as 'blocks"),
        ({"memory": "60e9"}, TypeError, "a number of bytes"),
        ({"memory": 0}, ValueError, "more than 0 bytes"),
        ({"prefetch": -1}, ValueError, "at least 0 calls"),
        ({"prefetch": 1.5}, TypeError, "a number of calls"),
    ]
    for options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            cg.fsdp(**options)
    with pytest.raises(TypeError, match=r"fsdp='step': what cg\.fsdp"):
        lowered().compile(fsdp="step")  # type: ignore[arg-type]


def test_an_unknown_axis() -> None:
    with pytest.raises(ValueError, match=r"is cut along 'data', but the mesh dp=2, tp=1"):
        lowered(cg.cut(0, "data"))


# -- mutations -------------------------------------------------------------------------------


def placed(keep: str) -> Module:
    """The module as it is before transfers are lowered."""
    trace = lowered().trace
    pipeline = default_pipeline(fsdp=Fsdp(keep=keep))
    names = [each.name for each in pipeline]
    module = trace.module
    PassManager(pipeline[: names.index("insert-transfers") + 1]).run(module)
    verify(module)
    return module


@pytest.mark.parametrize("keep", ["step", "task"])
def test_every_gather_and_every_reduction_is_needed(keep: str) -> None:
    module = placed(keep)
    found = [op for op in module.program.ops if isinstance(op, Transfer) and op.traffic]
    assert {op.traffic for op in found} == {Traffic.GATHER, Traffic.REDUCE}
    for op in found:
        users = [each for each in module.program.ops if op.result in each.operands]
        before = [each.operands for each in users]
        for each in users:
            each.operands = tuple(op.operands[0] if v is op.result else v for v in each.operands)
        with pytest.raises(IRError):
            verify(module)
        for each, operands in zip(users, before, strict=True):
            each.operands = operands
    verify(module)


def test_a_use_behind_the_update_is_refused() -> None:
    module = placed("step")
    ops = module.program.ops
    (update,) = (op for op in ops if isinstance(op, Call) and op.fn.name.endswith(".update"))
    use = next(op for op in ops if isinstance(op, Call) and ".forward.part" in op.fn.name)
    ops.remove(update)
    ops.insert(ops.index(use), update)
    with pytest.raises(IRError, match="from before a call that may have changed it"):
        verify(module)


def test_a_plain_step_is_as_it_was() -> None:
    """Of actors that store nothing in pieces the pass changes nothing."""
    model = Model([(Tower, (0, "sgd"))])
    stages = model.on([cg.mesh(dp=2, tp=1)])
    step = cg.trace(step_of(stages, 2)).lower(*batch(0, 4, "reals"))
    reports = {report.name: report for report in step.compile().reports}
    assert not reports["fsdp"].changed
    assert plain_step(model.plain(), 2, *batch(0, 4, "reals"))[0].isfinite()
