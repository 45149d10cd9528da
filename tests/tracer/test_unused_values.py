"""A value that a method is handed and does not use gets no gradient, and so does what made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..sampling import examples

torch.set_num_threads(1)

HEADS = ("a", "b", "c")
Use: TypeAlias = tuple[str, str]
"""The head that is used, and how."""
Uses: TypeAlias = tuple[tuple[Use, ...], ...]
"""What each head of a stage is made of."""


STOP: Uses = ()
"""A stage that gives no gradient, be it to a parameter."""


class Stops(torch.autograd.Function):
    """An identity whose backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "used": torch.tanh,
    "viewed": lambda x: x.t().reshape(4, 4),
    "in place": lambda x: torch.zeros(4, 4, dtype=x.dtype).copy_(x).mul_(2),
    "detached": lambda x: x.detach() * 2,
    "without gradient": without_gradient,
    "counted": lambda x: x.argmax(dim=0, keepdim=True).to(x.dtype),
    "stopped": Stops.apply,
    "times nothing": lambda x: x * 0,
}


@cg.actor
class ThreeHeadedStage(nn.Module):
    """A stage with three heads, each of a weight of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for head in HEADS:
            weight = torch.randn(4, 4, generator=generator, dtype=torch.float64)
            setattr(self, head, nn.Parameter(weight))

    def forward(self, x: dict[str, Tensor], uses: Uses) -> dict[str, Tensor]:
        made = {}
        for head, of in zip(HEADS, uses, strict=True):
            total = sum((HOW[how](x[source]) for source, how in of), torch.ones(4, 4).double())
            made[head] = total @ getattr(self, head)
        return made

    def same(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": x["b"], "b": x["a"] * self.a.sum(0), "c": x["c"][:, :2] @ self.c[:2]}

    def stop(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {head: Stops.apply(value @ self.a) for head, value in x.items()}

    def loss(self, x: dict[str, Tensor], names: Sequence[str]) -> Tensor:
        return sum((x[name].square().mean() for name in names), torch.zeros(()).double())


X = {h: torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i, h in enumerate(HEADS)}
X = {head: value.double() for head, value in X.items()}


def run(
    stages: Sequence[Any],
    x: dict[str, Tensor],
    uses: Sequence[Uses | None],
    names: Sequence[str],
    back: Callable[[Tensor], object],
) -> Tensor:
    losses = []
    for mx in cg.microbatches(x, 2):
        for stage, use in zip(stages, uses, strict=True):
            if use == STOP:
                mx = stage.stop(mx)
            else:
                mx = stage.same(mx) if use is None else stage.forward(mx, use)
        losses.append(stages[-1].loss(mx, names))
    loss = cg.mean(losses)
    back(loss)
    return loss


def compare(
    uses: Sequence[Uses | None],
    names: Sequence[str],
    ranks: int,
    schedule: str = "gpipe",
    mesh: Any = None,
    plan: Any = None,
) -> cg.Compiled:
    """Compare gradients of a step with those of plain PyTorch; the compiled step."""
    plain = [ThreeHeadedStage(seed) for seed in range(len(uses))]
    expected = run(plain, X, uses, names, lambda loss: loss.backward())
    with use_world(VirtualWorld(ranks)):
        places = [i * ranks // len(uses) if mesh is None else mesh for i in range(len(uses))]
        options = {} if plan is None else {"plan": plan}
        actors = [ThreeHeadedStage.on(p, **options)(i) for i, p in enumerate(places)]  # type: ignore[attr-defined]

        @cg.trace
        def step(x: dict[str, Tensor]) -> Tensor:
            return run(actors, x, uses, names, cg.backward)

        compiled = step.lower(X).compile(schedule=cg.schedules.by_name(schedule))
        torch.testing.assert_close(compiled(X), expected.detach())
        for index, (actor, module) in enumerate(zip(actors, plain, strict=True)):
            for name, parameter in module.named_parameters():
                for instance in actor.instances.values():
                    ours, theirs = getattr(instance, name).grad, parameter.grad
                    assert (ours is None) == (theirs is None), f"stage {index}, {name}"
                    if theirs is not None:
                        torch.testing.assert_close(ours, theirs)
    return compiled


ALL: Uses = tuple(((head, "used"),) for head in HEADS)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_head_that_the_loss_does_not_read_gets_no_gradient(ranks: int, schedule: str) -> None:
    compare([ALL, None, ALL], ["a"], ranks, schedule)


@pytest.mark.parametrize("how", sorted(HOW))
def test_ways_to_use_a_value(how: str) -> None:
    uses: Uses = ((("a", how), ("b", "used")), (("a", "used"),), (("c", how),))
    compare([ALL, uses], ["a", "c"], 2)


def test_all_gradients_may_be_stopped() -> None:
    compare([ALL, STOP, ALL], HEADS, 2)
    compare([ALL, STOP], HEADS, 2)


def test_no_gradient_travels_that_nobody_uses() -> None:
    compiled = compare([ALL, ALL], ["b"], 2)
    programs = compiled.module.programs
    sent = [op for program in programs for op in program.ops if op.opcode == "send"]
    assert len([op for op in sent if "grad" in op.operands[0].name]) == 2  # of each microbatch, one


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("names", [["a"], ["a", "c"], ["b"]], ids="".join)
def test_an_actor_on_a_mesh_gets_no_gradient_that_nobody_uses(
    names: list[str], schedule: str
) -> None:
    plan = {"forward(x)|same(x)|loss(x)": cg.cut(0, "dp")}
    compare([ALL, None, ALL], names, 2, schedule, cg.mesh(dp=2), plan)


def test_a_backward_on_a_mesh_that_gives_nothing_is_refused() -> None:
    plan = {"stop(x)|forward(x)|same(x)|loss(x)": cg.cut(0, "dp")}
    with pytest.raises(cg.TraceError, match="gives no gradient to any argument") as raised:
        compare([ALL, STOP, ALL], HEADS, 2, "gpipe", cg.mesh(dp=2), plan)
    assert "detach" in str(raised.value)


head = st.sampled_from(HEADS)
use = st.lists(st.tuples(head, st.sampled_from(sorted(HOW))), max_size=3).map(tuple)


@examples(120, shrinks=True)
@given(
    st.lists(st.one_of(st.none(), st.tuples(use, use, use)), min_size=1, max_size=4),
    st.lists(head, min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
)
def test_random_uses(uses: list[Uses | None], names: list[str], ranks: int) -> None:
    compare([ALL, *uses], names, ranks)
