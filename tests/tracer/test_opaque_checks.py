"""An opaque method changes, in the middle of an execution, what a trace of its actor relied on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.tracer.errors import TraceError


@cg.actor
class Scaled(nn.Module):
    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0
        self.updates = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.offset

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * self.scale

    @cg.opaque
    def rescale(self, factor: float) -> None:
        self.scale *= factor

    @cg.opaque
    def update(self) -> None:
        self.updates += 1

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def bump(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def bump_data(self, x: torch.Tensor) -> torch.Tensor:
        x.data += 1
        return x * 1

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def bump_numpy(self, x: torch.Tensor) -> torch.Tensor:
        x.numpy()[0] = 7
        return x * 1

    def hold(self, holder: Any) -> torch.Tensor:
        return holder.x * 2


def test_a_traced_method_after_an_opaque_one_notices() -> None:
    actor = Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        actor.rescale(3.0)
        return actor.forward(x)

    with pytest.raises(cg.RemoteError, match=r"'scale' was 2.0 when it was traced and is 6.0 now"):
        step(torch.ones(2, 4))


def test_so_does_its_derivative() -> None:
    actor = Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> None:
        actor.rescale(3.0)
        cg.backward(actor.total(x))

    with pytest.raises(cg.RemoteError, match=r"Mark the method that reads it @cg\.opaque"):
        step(torch.ones(2, 4))
    assert actor.local.linear.weight.grad is None


def test_what_no_trace_reads_may_change() -> None:
    actor = Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        actor.update()
        return actor.forward(x)

    x = torch.ones(2, 4)
    for _ in range(2):
        assert torch.equal(step(x), actor.forward(x))
    assert actor.local.updates == 2


@pytest.mark.parametrize("where", ["object", "class"])
def test_data_of_the_class_is_guarded(where: str) -> None:
    actor = Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return actor.forward(x)

    step(torch.ones(2, 4))
    target = Scaled if where == "class" else actor.local
    target.offset = 5.0
    try:
        with pytest.raises(RuntimeError, match=r"'offset' was 1.0 when it was traced and is 5.0"):
            step(torch.ones(2, 4))
    finally:
        Scaled.offset = 1.0


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_values_in_objects_are_refused_where_they_are_handed_over() -> None:
    actor = Scaled.on(0)()

    def step(x: torch.Tensor) -> torch.Tensor:
        return actor.hold(Holder(x))

    with pytest.raises(TraceError, match="takes a Holder that holds a value of the step") as caught:
        cg.trace(step)(torch.ones(2, 4))
    assert caught.value.loc is not None
    assert caught.value.loc.function == "step"
    assert "register_dataclass" in caught.value.remedy
    for view in (dict.values, dict.items):
        with pytest.raises(TraceError, match=f"takes a dict_{view.__name__} that holds a value of"):
            cg.trace(lambda x, view=view: actor.hold(view({"x": x})))(torch.ones(2, 4))


def test_a_method_can_be_a_step() -> None:
    class Trainer:
        def __init__(self, factor: float) -> None:
            self.actor = Scaled.on(0)()
            self.factor = factor

        @cg.trace
        def step(self, x: torch.Tensor, extra: float = 0.0) -> torch.Tensor:
            return self.actor.forward(x) * self.factor + extra

    one, two = Trainer(1.0), Trainer(2.0)
    x = torch.ones(2, 4)
    for trainer in (one, two):
        expected = trainer.actor.forward(x) * trainer.factor
        assert torch.equal(trainer.step(x), expected)
        assert torch.equal(trainer.step(x, extra=1.0), expected + 1)
        assert trainer.step is trainer.step
        assert torch.equal(trainer.step.lower(x).compile()(x), expected)
    assert one.step is not two.step


def test_the_mean_of_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cg\.mean takes tensors, not 2\.0"):
        cg.mean([torch.ones(()), 2.0])  # type: ignore[list-item]


@pytest.mark.parametrize("shared", ["input", "value"])
def test_an_opaque_method_that_writes_to_what_others_use(shared: str) -> None:
    one, two = Scaled.on(0)(), Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x if shared == "input" else one.forward(x)
        return two.bump(h), h

    message = r"bump has written to a tensor that it was given, float32\[2,4\]"
    with pytest.raises(cg.RemoteError, match=message):
        step(torch.ones(2, 4))


@pytest.mark.parametrize("method", ["bump_data", "bump_numpy"])
def test_a_write_that_no_version_counts(method: str) -> None:
    one, two = Scaled.on(0)(), Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = one.forward(x)
        return getattr(two, method)(h), h

    with torch.no_grad(), pytest.raises(cg.RemoteError, match=rf"{method} has written to a tensor"):
        step(torch.ones(2, 4))


def test_what_nobody_else_uses_may_be_written_to() -> None:
    one, two = Scaled.on(0)(), Scaled.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return two.bump(one.forward(x))

    x = torch.ones(2, 4)
    assert torch.equal(step(x), one.forward(x) + 1)
