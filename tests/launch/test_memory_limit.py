"""`compile(memory=...)`: programs keep to it, with the same bits; or what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from benchmarks.held_memory import HeldMemory
from cg.backends.virtual.world import VirtualWorld
from cg.ir.pipeline.tradeoff import SavingPoint, Tradeoff
from cg.launch.api.fit_trace import with_recomputation
from cg.launch.api.select_schedule import costs_of, with_host_link
from cg.launch.world.world import use_world
from cg.passes.memory.memory_limit import MemoryLimit
from cg.passes.schedules import candidates

from ..stages import mean_loss

pytestmark = pytest.mark.timeout(300)

WIDTH, TOKENS = 32, 8


class Layer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, tokens, 4, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up(self.norm2(x)))
        if self.drop:
            hidden = functional.dropout(hidden, self.drop)
        return x + self.down(hidden)


@cg.actor
class GptStage(nn.Module):
    """Some layers of a GPT."""

    def __init__(self, layers: int, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(drop) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Pipe:
    """A GPT on some ranks of a virtual world, and its step."""

    def __init__(
        self, schedule: str, ranks: int, microbatches: int, layers: int = 2, drop: float = 0.0
    ) -> None:
        torch.manual_seed(0)
        chunks = 2 if schedule in ("zb-v", "interleaved") else 1
        places = [stage % ranks for stage in range(chunks * ranks)]
        if schedule == "zb-v":
            places = [*range(ranks), *reversed(range(ranks))]
        self.stages = [GptStage.on(rank)(layers, drop) for rank in places]
        self.schedule = cg.schedules.by_name(schedule)
        self.x = torch.randn(2 * microbatches, TOKENS, WIDTH)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return mean_loss(self.stages, x, microbatches)

        self.step = step
        self.lowered = step.lower(self.x)

    def compile(self, memory: Any = None) -> cg.Compiled:
        return self.lowered.compile(schedule=self.schedule, memory=memory, seed=3)

    def run(self, compiled: cg.Compiled) -> list[Tensor]:
        """The loss and all gradients of an execution."""
        for stage in self.stages:
            stage.local.zero_grad()
        loss = compiled(self.x)
        parameters = [p for stage in self.stages for p in stage.local.parameters()]
        return [loss, *(p.grad for p in parameters if p.grad is not None)]


@pytest.fixture(scope="module")
def small() -> tuple[VirtualWorld, Pipe]:
    """A pipeline of two ranks, for tests that compile it in vain."""
    world = VirtualWorld(2)
    with use_world(world):
        return world, Pipe("1f1b", 2, 2, layers=1)


def peaks(compiled: cg.Compiled) -> list[int]:
    return [plan.peak for plan in compiled.memory_analysis()]


@pytest.mark.parametrize(
    ("schedule", "share", "ranks"),
    [
        ("zb-v", 0.4, 2),
        *(
            pytest.param(schedule, share, ranks, marks=pytest.mark.slow)
            for schedule, share, ranks in [
                ("1f1b", 0.6, 2),
                ("1f1b", 0.5, 4),
                ("1f1b", 0.4, 4),
                ("zb-h1", 0.5, 4),
                ("zb-h1", 0.4, 4),
                ("zb-v", 0.5, 4),
                ("zb-v", 0.25, 4),
                ("interleaved", 0.5, 4),
                ("interleaved", 0.25, 4),
            ]
        ),
    ],
)
def test_programs_keep_to_the_memory_with_the_same_bits(
    schedule: str, share: float, ranks: int
) -> None:
    with use_world(VirtualWorld(ranks)):
        pipe = Pipe(schedule, ranks, 2 * ranks, layers=1 if ranks == 2 else 2)
        plain = pipe.compile()
        expected = pipe.run(plain)
        memory = int(share * max(peaks(plain)))
        compiled = pipe.compile(memory)
        assert max(peaks(compiled)) <= memory
        found = pipe.run(compiled)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backwards_stay_whole_where_what_they_leave_to_w_does_not_fit() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("zb-h1", 2, 4, layers=2)
        plain = pipe.compile()
        expected = pipe.run(plain)
        compiled = pipe.compile(int(0.4 * max(peaks(plain))))
        found = pipe.run(compiled)
    assert "backwards stay whole" in compiled.memory_report
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def saved_of(report: str) -> list[int]:
    return [
        int(line.split("saves ")[1].split()[0].replace(",", ""))
        for line in report.splitlines()
        if "saves" in line
    ]


def test_early_stages_save_less() -> None:
    with use_world(VirtualWorld(3)):
        pipe = Pipe("1f1b", 3, 6)
        memory = int(0.6 * max(peaks(pipe.compile())))
        compiled = pipe.compile(memory)
        saved = saved_of(compiled.memory_report)
    assert len(saved) == 3
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]
    assert f"of {memory:,} bytes, at @gptstage" in compiled.memory_report.lower()
    assert "forward.vjp.backward in 0B" in compiled.memory_report


def test_each_rank_has_a_limit_of_its_own() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 4)
        plain = peaks(pipe.compile())
        compiled = pipe.compile([plain[0], int(0.7 * plain[1])])
        saved = saved_of(compiled.memory_report)
        assert peaks(compiled)[0] <= plain[0]
        assert peaks(compiled)[1] <= 0.7 * plain[1]
    assert saved[0] > saved[1]


def test_what_is_drawn_is_drawn_once() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 4, layers=1, drop=0.4)
        plain = pipe.compile()
        expected = pipe.run(plain)
        compiled = pipe.compile(int(0.7 * max(peaks(plain))))
        found = pipe.run(compiled)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_enough_memory_changes_nothing() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 3, layers=1)
        plain, ample = pipe.compile(), pipe.compile("1GiB")
        assert plain.memory_report == ""
        assert ample.memory_report.count("\n") == 1
        assert ample.as_text(0) == plain.as_text(0)


def test_too_little_memory_is_refused_with_the_least() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 3, layers=1)
        with pytest.raises(cg.TraceError, match=r"memory= allows 20,000 bytes on rank") as caught:
            pipe.compile(20_000)
        text = str(caught.value)
        assert "too many" in text
        assert "in step" in text
        least = int(text.split("was found to hold is ")[1].split(",")[0] + "000")
        assert least > 20_000
        # And the least that it names, rounded up, is enough for that rank.
        rank = int(text.split("on rank ")[1].split(",")[0])
        words = text.split("was found to hold is ")[1]
        number = int(words.split(", at")[0].replace(",", ""))
        compiled = pipe.compile([number if r == rank else 10**9 for r in range(2)])
        assert peaks(compiled)[rank] <= number


def test_auto_takes_the_memory() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 4, layers=1)
        plain = pipe.compile()
        expected = pipe.run(plain)
        pipe.schedule = cg.schedules.auto()
        memory = int(0.8 * max(peaks(plain)))
        compiled = pipe.compile(memory)
        assert max(peaks(compiled)) <= memory
        assert "auto" in compiled.schedule_report
        found = pipe.run(compiled)
        for options in ({"max_bytes": 10**6}, {"remat": True}):
            pipe.schedule = cg.schedules.auto(**options)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="both say what a program may hold"):
                pipe.compile(memory)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_ranks_of_a_mesh_decide_together() -> None:
    with use_world(VirtualWorld(4)):
        plan = cg.plan(
            {
                "*.up.*": cg.cut(0, "tp"),
                "*.down.weight": cg.cut(1, "tp"),
                "*.down.bias|*.norm*|*.qkv.*|*.out.*": cg.whole,
            }
        )
        grid = cg.mesh(pp=2, tp=2)
        stages = [GptStage.on(mesh, plan=plan)(1) for mesh in grid.unbind("pp")]

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return mean_loss(stages, x, 4)

        x = torch.randn(8, TOKENS, WIDTH)
        lowered = step.lower(x)
        plain = lowered.compile()
        memory = int(0.8 * max(peaks(plain)))
        fitted = lowered.compile(memory=memory)
        saved = saved_of(fitted.memory_report)
        assert max(peaks(fitted)) <= memory
        assert saved[0] == saved[1] < saved[2] == saved[3]
        assert torch.equal(plain(x), fitted(x))


def test_variants_fit_one_by_one() -> None:
    with use_world(VirtualWorld(2)):
        pipe = Pipe("1f1b", 2, 4, layers=1)
        memory = int(0.8 * max(peaks(pipe.compile())))
        expected = pipe.run(pipe.compile())[0]
        lowered = pipe.step.lower_many([pipe.x, pipe.x[:8]])
        compiled = lowered.compile(memory=memory, seed=3)
        assert torch.equal(compiled(pipe.x), expected)
        assert compiled(pipe.x[:8]).isfinite()
        assert max(peaks(compiled)) <= memory


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_peak_is_the_one_that_is_measured(share: float) -> None:
    """On one rank, whose gradients are there already, so that nothing else lasts."""
    with use_world(VirtualWorld(1)):
        pipe = Pipe("gpipe", 1, 4)
        compiled = pipe.compile()
        compiled = pipe.compile(int(share * max(peaks(compiled))))
        pipe.run(compiled)
        compiled(pipe.x)
        plan = compiled.memory_analysis()[0]
        with HeldMemory() as mode:
            compiled(pipe.x)
    assert mode.peak == pytest.approx(plan.working, rel=0.03)


@pytest.mark.parametrize(
    ("memory", "size"),
    [(1, 1), ("40GiB", 40 * 2**30), ("512 MB", 512 * 10**6), ("1.5KiB", 1536), ("7B", 7)],
)
def test_bytes_are_numbers_or_text(memory: Any, size: int) -> None:
    assert MemoryLimit.of(memory).bytes == (size,)
    assert MemoryLimit.of([memory, 5]).of_ranks(2, 1) == [size, 5]
    assert MemoryLimit.of([2 * size]).of_ranks(3, 2) == [size] * 3


@pytest.mark.parametrize(
    ("memory", "error", "message"),
    [
        (True, TypeError, "bytes as an int"),
        (1.5, TypeError, "bytes as an int"),
        ("40", ValueError, "a number and a unit"),
        ("40iB", ValueError, "a number and a unit"),
        ("forty GiB", ValueError, "a number and a unit"),
        (0, ValueError, "more than 0"),
        ([], ValueError, "for each rank"),
        ([1, 2, 3], ValueError, "has 3 numbers, and the world has 2 ranks"),
    ],
)
def test_other_limits_are_refused(
    small: tuple[VirtualWorld, Pipe], memory: Any, error: type[Exception], message: str
) -> None:
    world, pipe = small
    with use_world(world), pytest.raises(error, match=message):
        pipe.compile(memory)


def test_a_tradeoff_gives_the_least_work_within_a_limit() -> None:
    points = (SavingPoint(100, 0), SavingPoint(60, 4), SavingPoint(10, 30))
    tradeoff = Tradeoff(points, 40)
    assert (tradeoff.most, tradeoff.least) == (100, 10)
    assert [tradeoff.within(limit) for limit in (100, 99, 60, 59, 5)] == [
        points[0],
        points[1],
        points[1],
        points[2],
        points[2],
    ]


def test_a_search_counts_what_is_computed_again() -> None:
    with use_world(VirtualWorld(2)):
        module = Pipe("1f1b", 2, 4, layers=1).lowered.trace.module
    names = sorted(module.vjps)
    tradeoff = Tradeoff((SavingPoint(100, 0), SavingPoint(10, 50)), 100)
    actors = {name: module.functions[module.vjps[name].forward].actor for name in names}
    stages = sorted(filter(None, actors.values()), key=lambda actor: (len(actor), actor))
    first = next(name for name, actor in actors.items() if actor == stages[0])
    vjp = module.vjps[first]
    measured = {vjp.forward: 4.0, vjp.backward: 8.0}
    schedule = cg.schedules.auto(costs=cg.Costs(tf=3.0, functions=measured))
    changed = with_recomputation(schedule, module, dict.fromkeys(names, tradeoff), {first: 10})
    costs = costs_of(changed)
    assert costs is not None
    assert costs.functions == {vjp.forward: 4.0, vjp.backward: 10.0}
    assert costs.tb == (2.5, 1.0)
    assert with_recomputation(schedule, module, {}, {}) is schedule
    # Without costs all tasks take as long, and programs are not compared.
    changed = with_recomputation(
        cg.schedules.auto(), module, dict.fromkeys(names, tradeoff), {first: 10}
    )
    costs = costs_of(changed)
    assert costs is not None
    assert costs.tb == (1.5, 1.0)
    assert changed is not None
    assert len(candidates(changed)) == 1 < len(candidates(schedule))
    plain = cg.schedules.by_name("1f1b")
    assert with_recomputation(plain, module, {first: tradeoff}, {first: 10}) is plain


def test_a_search_compares_programs_by_the_link_that_is_given() -> None:
    link = cg.Link(1.0, 2.0)
    changed = with_host_link(cg.schedules.auto(costs=cg.Costs(tf=3.0)), link)
    costs = costs_of(changed)
    assert costs is not None
    assert (costs.tf, costs.host) == (3.0, link)
    for schedule in (None, cg.schedules.auto(), cg.schedules.by_name("1f1b")):
        assert with_host_link(schedule, link) is schedule


def test_costs_are_costs() -> None:
    with use_world(VirtualWorld(2)), pytest.raises(TypeError, match=r"costs=3\.0: what cg\.meas"):
        Pipe("1f1b", 2, 4, layers=1).lowered.compile(costs=3.0)  # type: ignore[arg-type]
