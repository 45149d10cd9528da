"""What a forward saves within a limit: the choice, its optimality, and equal bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.ir.types import tensor_bytes
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.graph.autodiff.backward_cut import BackwardCut
from cg.tracer.graph.autodiff.recomputation import Recompute, kept_bytes, recomputed
from cg.tracer.graph.autodiff.saved_tensors import SavingLimits, Savings
from cg.tracer.graph.autodiff.saving_problem import Frontier, SavingChoice, SavingProblem
from cg.tracer.values.interface import MethodTarget, TracedVjp

from ..sampling import examples
from .function_tools import signature, trace
from .test_functions import rand
from .test_recomputation import CHECKED, WIDTH, Dropping, Gated, Layers, joint_of, operators
from .test_split_backward import MORE, run

pytestmark = pytest.mark.timeout(120)


def chain(seed: int, length: int) -> SavingProblem:
    """A chain of operators, some of which take an earlier value as well or cannot run again."""
    draw = random.Random(seed)
    operands = [
        (i, draw.randrange(i)) if i > 1 and draw.random() < 0.3 else (i,) for i in range(length)
    ]
    return SavingProblem(
        tuple(draw.randint(1, 20) * 100 for _ in range(length + 1)),
        (None, *(i if draw.random() < 0.9 else None for i in range(length))),
        tuple(draw.randint(1, 50) * 10 for _ in range(length)),
        tuple(operands),
        tuple(v for v in range(length + 1) if v == length or draw.random() < 0.7),
    )


def best(problem: SavingProblem, limit: int) -> SavingChoice:
    """The choice with the least work, of all sets of operators."""
    count = len(problem.works)
    sets = ([i for i in range(count) if mask >> i & 1] for mask in range(1 << count))
    fitting = [c for c in map(problem.choice, sets) if c.size <= limit]
    return min(fitting, key=lambda choice: choice.work)


@examples(60)
@given(seed=st.integers(0, 10**9), share=st.floats(0, 1))
def test_of_short_chains_no_choice_has_two_percent_less_work(seed: int, share: float) -> None:
    problem = chain(seed, 9)
    frontier = Frontier(problem)
    most, least = frontier.corners[0].size, frontier.corners[-1].size
    assert least == min(
        problem.choice([i for i in range(9) if mask >> i & 1]).size for mask in range(512)
    )
    limit = int(least + share * (most - least))
    choice = frontier.within(limit)
    assert choice.size <= limit
    assert choice.work <= 1.02 * best(problem, limit).work


@examples(20)
@given(seed=st.integers(0, 10**9), length=st.integers(2, 120))
def test_a_frontier_descends(seed: int, length: int) -> None:
    problem = chain(seed, length)
    frontier = Frontier(problem)
    choices = frontier.choices()
    assert choices[0] == problem.choice(())
    for more, less in pairwise(choices):
        assert less.size < more.size
        assert less.work > more.work
        assert frontier.within(more.size).work <= more.work


def test_less_than_the_least_is_the_least() -> None:
    frontier = Frontier(chain(0, 9))
    assert frontier.within(0).size == frontier.corners[-1].size


def vjp_of(
    module: nn.Module, inputs: Sequence[Tensor], limits: SavingLimits, fused: bool = False
) -> TracedVjp:
    outputs = tuple(range(len(trace(module, "forward", *inputs).declaration.outputs)))
    needed = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
    target = MethodTarget("actor", module, "forward")
    functions = Functions(limits=limits, fused=fused)
    return functions.trace_vjp(target, signature(*inputs), "f.vjp", outputs, needed, None)


def saved_bytes(vjp: TracedVjp) -> int:
    first, count = vjp.first.declaration, len(vjp.vjp.grad_outputs)
    saved = len(vjp.second.declaration.inputs) - count
    return sum(map(tensor_bytes, first.outputs[len(first.outputs) - saved :]))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    **MORE,
    **CHECKED,
    "two layers": (lambda: Layers(2), (rand(2, 6, WIDTH),)),
}


@pytest.mark.parametrize(
    ("case", "fused"), [*((case, False) for case in MODELS), *((case, True) for case in CHECKED)]
)
def test_gradients_are_the_same_bits_within_any_limit(case: str, fused: bool) -> None:
    make, inputs = MODELS[case]
    module = make()
    before = copy.deepcopy(module.state_dict())
    limits = SavingLimits()
    plain = vjp_of(module, inputs, limits, fused)
    assert plain.tradeoff is not None
    points = plain.tradeoff.points
    for point in points[:: max(1, len(points) // 3)]:
        traced = vjp_of(module, inputs, limits.to({"f.vjp": point.saved}), fused)
        assert saved_bytes(traced) <= max(point.saved, saved_bytes(plain))
        for halves in (False, True):
            if halves and traced.vjp.weight is None:
                continue
            module.load_state_dict(before)
            expected = run(plain, module, inputs, False)
            module.load_state_dict(before)
            torch.testing.assert_close(
                run(traced, module, inputs, halves), expected, rtol=0, atol=0, equal_nan=True
            )


def test_fewer_bytes_take_more_work() -> None:
    savings = Savings(joint_of(Layers(4), rand(2, 6, WIDTH)))
    tradeoff = savings.tradeoff
    assert tradeoff.points[0].again == 0
    assert tradeoff.least < 0.1 * tradeoff.most
    assert tradeoff.points[-1].again < tradeoff.work
    cheap = tradeoff.within(int(0.6 * tradeoff.most))
    assert cheap.again < 0.3 * tradeoff.work


def test_what_is_said_to_be_saved_is_saved() -> None:
    joint = joint_of(Layers(2), rand(2, 6, WIDTH))
    savings = Savings(joint)
    for point in savings.tradeoff.points[::6]:
        choice = savings.frontier.within(point.saved)
        cut = BackwardCut(joint, (), savings.nodes(choice))
        assert {node.name for node in cut.saved} == {t.name for t in savings.tensors(choice)}
        assert kept_bytes(cut) == choice.size


def test_saved_tensors_are_described() -> None:
    savings = Savings(joint_of(Gated(), rand(4, WIDTH)))
    x, gate, *_ = savings.tensors(savings.frontier.corners[0])
    assert (x.operator, x.is_recomputable, x.takes, x.work) == ("input", False, (), 0)
    assert (gate.operator, gate.is_recomputable) == ("aten::mm", True)
    assert x.name in gate.takes
    assert gate.nbytes == 4 * gate.shape[0] * gate.shape[1]
    assert gate.work > 2 * 4 * WIDTH * gate.shape[1]


def test_what_is_drawn_is_saved_and_what_follows_is_not() -> None:
    joint = joint_of(Dropping(), rand(4, WIDTH))
    savings = Savings(joint)
    least = savings.frontier.corners[-1]
    kept = [tensor.operator for tensor in savings.tensors(least)]
    assert kept == ["input", "aten::empty_like"]  # the mask, into which is drawn
    again = operators([n for n in joint.graph.nodes if n in savings.nodes(least)])
    assert {"mm.default", "silu.default", "mul.Tensor"} <= set(again)


class Marked(nn.Module):
    """Two layers, whose activations are marked."""

    def __init__(self, keep: bool = False, recompute: bool = False, draw: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.keep, self.recompute, self.draw = keep, recompute, draw

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.draw:
            hidden = hidden * cg.recompute(torch.rand_like(hidden).view(-1, 64))
        if self.keep:
            hidden = cg.keep(hidden)
        if self.recompute:
            hidden = cg.recompute(hidden)
        return self.down(hidden)


def kept_names(module: nn.Module, what: Recompute) -> list[str]:
    joint = joint_of(module, rand(4, WIDTH))
    saved = BackwardCut(joint, (), recomputed(joint, (), what)).saved
    return operators([node for node in joint.graph.nodes if node in saved])


def test_a_value_is_recomputed_by_hand() -> None:
    assert "tanh.default" in kept_names(Marked(), Recompute.NOTHING)
    assert "tanh.default" not in kept_names(Marked(recompute=True), Recompute.NOTHING)
    assert "addmm.default" in kept_names(Marked(recompute=True), Recompute.NOTHING)


class MarkedAlias(Marked):
    """Marks what does nothing, and is no part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(cg.recompute(torch.tanh(self.up(x))[...]))


def test_a_mark_of_an_alias_is_one_of_its_value() -> None:
    assert "tanh.default" not in kept_names(MarkedAlias(), Recompute.NOTHING)


def test_a_value_is_kept_by_hand() -> None:
    assert "tanh.default" not in kept_names(Marked(), Recompute.ALL)
    assert "tanh.default" in kept_names(Marked(keep=True), Recompute.ALL)
    least = Savings(joint_of(Marked(keep=True), rand(4, WIDTH))).frontier.corners[-1]
    assert least.size == 4 * (4 * WIDTH + 4 * 64)


@pytest.mark.parametrize("recompute", [False, True])
def test_marks_change_no_bits(recompute: bool) -> None:
    inputs = (rand(4, WIDTH),)
    torch.manual_seed(0)
    plain = Marked()
    marked = Marked(keep=not recompute, recompute=recompute)
    marked.load_state_dict(plain.state_dict())
    assert torch.equal(plain(inputs[0]), marked(inputs[0]))  # without a trace
    one, other = (run(vjp_of(m, inputs, SavingLimits()), m, inputs, False) for m in (plain, marked))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_drawn_is_not_recomputed_by_hand() -> None:
    joint = joint_of(Marked(draw=True), rand(4, WIDTH))
    with pytest.raises(TraceError, match=r"cg.recompute is given.*draws random numbers") as caught:
        recomputed(joint, (), Recompute.NOTHING)
    assert "test_saved_tensors.py" in str(caught.value)


class Opposed(Marked):
    """Keeps a value, of which it computes a view again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = cg.keep(torch.tanh(self.up(x)))
        return self.down(hidden * cg.recompute(hidden.view(2, -1, 64)).view(-1, 64))


def test_a_value_is_not_kept_and_its_view_recomputed() -> None:
    with pytest.raises(TraceError, match=r"cg.keep and cg.recompute are given what aten::tanh"):
        recomputed(joint_of(Opposed(), rand(4, WIDTH)), (), Recompute.NOTHING)


class OpposedAlias(Marked):
    """Keeps a value, and computes the same again, as one without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = cg.keep(torch.tanh(self.up(x)))
        return self.down(hidden * cg.recompute(hidden.detach()))


def test_a_value_is_not_kept_and_recomputed_as_an_alias() -> None:
    with pytest.raises(TraceError, match="are given one value, once as a view") as caught:
        joint_of(OpposedAlias(), rand(4, WIDTH))
    assert "test_saved_tensors.py" in str(caught.value)


@pytest.mark.parametrize("value", [3, "x", None])
def test_marks_are_for_tensors(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cg.keep takes a tensor that a method"):
        cg.keep(value)
