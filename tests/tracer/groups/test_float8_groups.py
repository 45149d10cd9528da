"""Layers in float8 on meshes: the values of one rank, reductions of maxima, bytes of gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cg
from cg.backends.fusion import fuse
from cg.backends.fusion.split import CompiledGraphs, compile_in_parts
from cg.ir.attributes import Traffic
from cg.ir.ops import AllReduce, Call, Collective
from cg.ir.ops.module import Module
from cg.ir.types import DType, TensorType, promised, tensor_bytes
from cg.tracer.method.float8.eager import computing_in_float8
from cg.tracer.values.float8_layers import Float8Use

from ...sampling import examples
from ...worlds import virtual_world
from . import training
from .training import HOMES, ROWS, TOWER_PLAN, Model, RecordingStage, batch, plain_step, train

pytestmark = pytest.mark.timeout(900)

SIZE = 16
STORE = cg.cut(0, "dp")

_world = virtual_world(8, threads=1, scope="module")


class Pair(nn.Module):
    """Two layers, whose results stay small."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 2 * SIZE, bias=False)
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.gate = nn.Linear(SIZE, 2 * SIZE, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).clamp(0, 1)).clamp(-2, 2)


@cg.actor
class Pairs(RecordingStage):
    """Layers in float8; as a plain object as well, so that it is its own oracle."""

    def __init__(
        self, seed: int, recipe: str, optimizer: str, depth: int = 1, gated: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Pair(gated) for _ in range(depth))
        self.is_integer = optimizer == "signs"
        self.finish(optimizer, False)
        if self.is_integer:
            with torch.no_grad():
                for parameter in self.parameters():
                    kept = torch.rand(parameter.shape) < 0.4
                    parameter.copy_(torch.randint(-1, 2, parameter.shape) * kept)
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return (h * y).sum() if self.is_integer else ((h - y) ** 2).mean()


class PlainPairs(Pairs):
    """The same in one process, by the formula in plain torch."""

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("the oracle calls methods")

    def forward(self, x: Tensor) -> Tensor:
        (layers,) = (cg.float8("*", recipe=self.recipe).float8,)
        with computing_in_float8(self, Float8Use(layers)):
            return super().forward(x)


class Layers(Model):
    """Stages in float8."""

    def plain(self) -> list[RecordingStage]:
        return [PlainPairs(*args) for _, args in self.stages]

    def in_float8(self, places: Any, plan: Any, recipe: str, store: Any = cg.whole) -> list[Any]:
        chosen = cg.plan(plan) | cg.float8("blocks.*", recipe=recipe)
        return self.on(places, [chosen] * len(self.stages), store=store)


def integers(seed: int, rows: int, *_: object) -> tuple[Tensor, Tensor]:
    x, y = batch(seed, rows, "integers", SIZE)
    return x.float(), y.float()


@pytest.fixture
def _floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "batch", integers)


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    schedule = draw(st.sampled_from([None, "gpipe", "1f1b", "zb-h1"]))
    dp, tp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]))
    is_stored = draw(st.booleans())
    keep = draw(st.sampled_from(["step", "task"])) if is_stored and dp > 1 else None
    plan = draw(st.sampled_from([TOWER_PLAN, ROWS]))
    return schedule, dp, tp, is_stored, keep, plan


@pytest.mark.usefixtures("_floats")
@examples(8)
@given(cases())
def test_scales_by_row_train_exactly(case: tuple[Any, ...]) -> None:
    """Scales are powers of 2 and all numbers small integers, so that sums are exact."""
    schedule, dp, tp, is_stored, keep, plan = case
    meshes = cg.mesh(range(2 * dp * tp), pp=2, dp=dp, tp=tp).unbind("pp")
    model = Layers([(Pairs, (seed, "rowwise", "signs")) for seed in range(2)])
    stages = model.in_float8(meshes, plan, "rowwise", STORE if is_stored else cg.whole)
    fsdp = None if keep is None else cg.fsdp(keep=keep)
    train(model, stages, 12, 2, schedule, "integers", steps=2, width=SIZE, fsdp=fsdp)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@examples(8)
@given(
    st.sampled_from([None, "gpipe", "zb-h1", "zb-v", "interleaved"]),
    st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1)]),
    st.sampled_from([None, "step", "task"]),
    st.sampled_from(["tensorwise", "rowwise"]),
)
def test_real_numbers_train_alike(
    schedule: str | None, grid: tuple[int, int], keep: str | None, recipe: str
) -> None:
    """Only the order of sums differs, and with it now and then the rounding to float8."""
    dp, tp = grid
    keep = keep if dp > 1 else None
    meshes = cg.mesh(range(2 * dp * tp), pp=2, dp=dp, tp=tp).unbind("pp")
    homes = HOMES.get(schedule, (0, 1))
    model = Layers([(Pairs, (seed, recipe, "sgd")) for seed in range(len(homes))])
    places = [meshes[home] for home in homes]
    store = cg.whole if keep is None else STORE
    stages = model.in_float8(places, TOWER_PLAN, recipe, store)
    chosen = None if schedule is None else cg.schedules.by_name(schedule)
    fsdp = None if keep is None else cg.fsdp(keep=keep)
    x, y = batch(0, 12, "reals", SIZE)
    compiled = cg.trace(training.step_of(stages, 2)).lower(x, y).compile(schedule=chosen, fsdp=fsdp)
    plain = model.plain()
    loss, outputs = compiled(x, y)
    expected_loss, expected = plain_step(plain, 2, x, y)
    assert relative(loss, expected_loss) < 1e-3
    for found, part in zip(outputs, expected, strict=True):
        assert relative(found, part) < 1e-2
    for stage, one in zip(stages, plain, strict=True):
        for rank, instance in stage.instances.items():
            for name, gradient in one.found.items():
                region = training.region_of(stage, name, rank)
                own = training.cut_out(gradient, region)
                assert relative(instance.found[name], own) < 2e-2, name


def lowered_of(store: Any, recipe: str = "tensorwise", count: int = 2) -> Any:
    model = Layers([(Pairs, (0, recipe, "sgd", 2))])
    stages = model.in_float8([cg.mesh(dp=2, tp=2)], TOWER_PLAN, recipe, store)
    return cg.trace(training.step_of(stages, count)).lower(*batch(0, 8, "reals", SIZE))


def collectives(module: Module, rank: int) -> list[Collective]:
    ops = module.program_of(rank).ops
    return [op for op in ops if isinstance(op, Collective) and op.chan is not None]


def gathered(module: Module) -> dict[DType, int]:
    """The bytes that rank 0 receives by gathers of parameters, by their type."""
    received: dict[DType, int] = {}
    for op in collectives(module, 0):
        assert op.chan is not None
        if module.channels[op.chan].traffic is Traffic.GATHER:
            sent, result = op.operands[0].type, promised(op.result.type)
            assert isinstance(sent, TensorType)
            more = tensor_bytes(result) - tensor_bytes(sent)
            received[sent.dtype] = received.get(sent.dtype, 0) + more
    return received


@pytest.mark.parametrize("keep", ["step", "task"])
def test_stored_weights_are_gathered_as_float8(keep: str) -> None:
    """A quarter of the bytes of float32, and so half of those of bfloat16."""
    fsdp = cg.fsdp(keep=keep)
    plain = gathered(lowered_of(STORE, "rowwise").compile(fsdp=fsdp).module)
    cast = gathered(lowered_of(STORE).compile(fsdp=fsdp).module)
    assert plain.keys() == {DType.F32}
    assert cast.keys() == {DType.F8E4M3}
    assert 4 * cast[DType.F8E4M3] == plain[DType.F32]


@pytest.mark.parametrize("store", [STORE, cg.whole], ids=["stored", "whole"])
def test_maxima_of_all_weights_are_reduced_once(store: Any) -> None:
    """One vector of the four weights, whatever the number of microbatches."""
    counts = []
    for count in (1, 4):
        module = lowered_of(store, count=count).compile().module
        calls = [op.fn.name for op in module.program_of(0).ops if isinstance(op, Call)]
        assert sum(name.endswith(".float8.maxima") for name in calls) == 1
        types = [op.result.type for op in collectives(module, 0) if isinstance(op, AllReduce)]
        counts.append(sum(promised(t) == TensorType(DType.F32, (4,), t.place) for t in types))
        casts = sum(name.endswith("weight.float8") for name in calls)
        assert casts == (0 if store is STORE else 4)
    assert counts[0] == counts[1] > 0


@cg.actor
class Attending(Pairs):
    """Layers of which two multiply one input, as those to queries and keys do."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(block.up(x).clamp(0, 1) * block.gate(x))
        return x


def deep(depth: int, recipe: str | None, **options: Any) -> Any:
    """The compiled training of a stack of layers on two ranks that store the weights."""
    plan = cg.plan({"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")})
    if recipe is not None:
        plan = plan | cg.float8("blocks.*", recipe=recipe)
    make = Attending.on(cg.mesh(dp=2), plan=plan, store=STORE)
    stage = make(0, recipe or "tensorwise", "sgd", depth, True)
    lowered = cg.trace(training.step_of([stage], 1)).lower(*batch(0, DEEP_ROWS, "reals", SIZE))
    return lowered.compile(fsdp=cg.fsdp(keep="task"), **options)


DEEP_ROWS = 64
"""So many that activations hold more than weights."""


def casts(types: Any) -> int:
    """The number of float8 tensors among types."""
    kinds = DType.F8E4M3, DType.F8E5M2
    return sum(isinstance(t, TensorType) and t.dtype in kinds for t in types)


@pytest.fixture(scope="module")
def stacks(_world: None) -> dict[tuple[int, bool], Any]:
    """Compiled stacks of 2 and 3 layers, in float8 and not."""
    recipes = {True: "tensorwise", False: None}
    return {(n, is_cast): deep(n, recipes[is_cast]) for n in (2, 3) for is_cast in recipes}


def test_backwards_make_casts_layer_by_layer(stacks: Any) -> None:
    """What a part hands to later ones does not grow with the layers behind it."""
    given = []
    for depth in (2, 3):
        functions = stacks[depth, True].module.functions.values()
        backward = [f for f in functions if ".backward.part" in f.name]
        given.append(max(casts(f.outputs) for f in backward))
    assert given[0] == given[1] > 0


@pytest.mark.parametrize("depth", [2, 3])
def test_a_program_in_float8_holds_no_more_at_its_peak(depth: int, stacks: Any) -> None:
    peaks = [plan.peak for plan in stacks[depth, True].memory_analysis()]
    limits = [plan.peak for plan in stacks[depth, False].memory_analysis()]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_layers_of_one_input_share_its_cast(stacks: Any) -> None:
    """A layer has three weights and two inputs, and so two greatest magnitudes to reduce."""
    reductions = []
    for depth in (2, 3):
        ops = collectives(stacks[depth, True].module, 0)
        reductions.append(sum(isinstance(op, AllReduce) for op in ops))
    gradients = 3
    assert reductions[1] - reductions[0] == 2 + gradients


def test_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[fx.GraphModule] = []

    def compile_(module: fx.GraphModule, _: Any) -> Any:
        compiled.append(module)
        return lambda values: module(*values)

    def fuser() -> Any:
        graphs = CompiledGraphs(compile_)

        def run(module: fx.GraphModule, examples: Any) -> Any:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            fakes = [mode.from_tensor(example) for example in examples]
            return compile_in_parts(module, fakes, mode, graphs)

        return run

    monkeypatch.setitem(fuse.FUSERS, "inductor", fuser)
    counts = []
    for depth in (3, 4):
        step = deep(depth, "tensorwise", fuse="inductor")
        step(*batch(0, DEEP_ROWS, "reals", SIZE))
        counts.append(len(compiled))
        compiled.clear()
    assert counts[0] == counts[1] > 0
