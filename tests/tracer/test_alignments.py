"""`ctc_loss` in traced methods, against eager PyTorch, and over ranks that share a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError

from ..sampling import examples
from .function_tools import check_equal, trace

CLASSES = 4


class Aligner(nn.Module):
    """The loss of labels for inputs [time, rows, 3], or [time, 3] for one row."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, CLASSES)
        self.options = options
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, x: Tensor, labels: Tensor, inputs: Any, targets: Any) -> Tensor:
        log_probs = self.linear(x).log_softmax(-1)
        return nn.functional.ctc_loss(log_probs, labels, inputs, targets, **self.options)

    def module(self, x: Tensor, labels: Tensor, inputs: Any, targets: Any) -> Tensor:
        log_probs = self.linear(x).log_softmax(-1)
        return nn.CTCLoss(**self.options)(log_probs, labels, inputs, targets)  # type: ignore[no-any-return]

    def under_autocast(self, x: Tensor, labels: Tensor, inputs: Any, targets: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(x, labels, inputs, targets)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Options, and arguments of a call; some targets are longer than their inputs."""
    time, rows = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    inputs = draw(st.lists(st.integers(1, time), min_size=rows, max_size=rows))
    targets = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    blank = draw(st.sampled_from([0, CLASSES - 1]))
    options = {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "blank": blank,
        "zero_infinity": True,  # without it, gradients of infinite losses are nan
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    spare = draw(st.integers(0, 2))
    labels = torch.randint(1, CLASSES, (rows, max(targets) + spare), generator=generator)
    labels = (labels - int(blank > 0)).to(dtype)
    kind = draw(st.sampled_from(["tuples", "lists", "tensors"]))
    if kind != "tensors" and draw(st.booleans()):
        labels = torch.cat([row[:n] for row, n in zip(labels, targets, strict=True)])
    make = {"tuples": tuple, "lists": list, "tensors": torch.tensor}[kind]
    x = torch.randn(time, rows, 3, generator=generator)
    return options, (x, labels, make(inputs), make(targets))


@examples(60)
@given(calls(), st.sampled_from(["loss", "module", "under_autocast"]))
def test_it_is_as_in_torch(call: tuple[dict[str, Any], tuple[Any, ...]], method: str) -> None:
    options, arguments = call
    check_equal(Aligner(**options), method, *arguments)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_row(reduction: str) -> None:
    arguments = torch.randn(5, 3), torch.tensor([1, 2, 2]), (5,), (3,)
    check_equal(Aligner(reduction=reduction), "loss", *arguments)


def test_an_infinite_loss() -> None:
    actor, x, labels = Aligner(reduction="none"), torch.randn(2, 2, 3), torch.ones(2, 2).long()
    lengths = ((2, 2), (1, 2))  # equal labels need a blank between them
    losses = trace(actor, "loss", x, labels, *lengths).body(x, labels)
    assert losses[0].isfinite().tolist() == [True, False]
    assert torch.equal(losses[0], actor.loss(x, labels, *lengths))


@pytest.mark.parametrize("inputs", [(5, 4, 5), torch.tensor([5, 4, 5])])
def test_lengths_of_other_rows(inputs: Any) -> None:
    x, labels = torch.randn(5, 2, 3), torch.ones(2, 1).long()
    with pytest.raises(TraceError, match=r"ctc_loss of 2 rows takes as many .* not 2, 3 and 2"):
        trace(Aligner(), "loss", x, labels, inputs, (1, 1))


# -- over ranks ---------------------------------------------------------------------------------

X = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(1, CLASSES, (4, 3), generator=torch.Generator().manual_seed(1))
LENGTHS = ((6, 5, 6, 4), (3, 2, 0, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [tuple, torch.tensor])
def test_rows_that_are_cut(kind: Any, reduction: str) -> None:
    lengths = [kind(length) for length in LENGTHS]
    plan = {"loss(x)": cg.cut(1, "dp"), "loss(labels)": cg.cut(0, "dp")}
    with use_world(VirtualWorld(2)):
        actor = cg.actor(Aligner).on(cg.mesh(dp=2), plan=plan)(reduction=reduction)

        @cg.trace
        def step(x: Tensor, labels: Tensor, *lengths: Any) -> Tensor:
            loss: Tensor = actor.loss(x, labels, *lengths)
            cg.backward(loss)
            actor.update()
            return loss

        losses = [step(X, LABELS, *lengths) for _ in range(3)]
    plain = Aligner(reduction=reduction)
    for loss in losses:
        expected = plain.loss(X, LABELS, *lengths)
        expected.backward()
        plain.update()
        torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"loss(x)": cg.cut(0, "dp")}, "dimension 0 of .* is needed whole in a loop over time"),
        ({"linear.*": cg.cut(0, "dp")}, "dimension 2 of .* is needed whole in a loop over time"),
    ],
)
def test_steps_and_classes_that_are_cut(plan: Any, reason: str) -> None:
    with use_world(VirtualWorld(2)):
        actor = cg.actor(Aligner).on(cg.mesh(dp=2), plan=plan)()
        step = cg.trace(lambda x, labels: actor.loss(x, labels, *LENGTHS))
        with pytest.raises(TraceError, match=reason) as caught:
            step(X, LABELS)
    assert "cg.layout(x, cg.whole)" in caught.value.remedy
