"""Gradients that eager PyTorch would give, or refuse to give, are never lost or wrong in silence.

State that changes between a forward and its backward, and results of opaque methods.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg

from ..worlds import virtual_world

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

_world = virtual_world(2)


@cg.actor
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def scaled(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale

    def shrink(self) -> None:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def shift(self) -> None:
        with torch.no_grad():
            self.linear.bias.add_(1)

    def rescale(self) -> None:
        self.scale = self.scale * 3

    def update(self) -> None:
        self.optimizer.step()

    def renew(self) -> None:
        self.linear.weight.grad = None
        self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())

    @cg.opaque
    def log(self, x: Tensor) -> None:
        self.seen.append(float(x.detach().sum()))

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def hidden(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def noise(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x)

    @cg.opaque(fake=lambda self, x: torch.empty(4, dtype=torch.int64))
    def labels(self, x: Tensor) -> Tensor:
        return self.linear(x.detach()).argmax(1)

    @cg.opaque
    def secret(self) -> Any:
        return {"w": self.linear.weight * 2}

    @cg.opaque(fake=lambda self, known, x: torch.empty_like(x))
    def reveal(self, known: Any, x: Tensor) -> Tensor:
        return known["w"].detach()[:1] * x.detach()

    def loss(self, h: Tensor, factor: Tensor | None = None) -> Tensor:
        return self.linear(h if factor is None else h * factor).square().sum()

    def picked(self, h: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(h), labels)


Build = Callable[[Any, Any], Callable[[Tensor], Tensor]]


def gradients(layers: tuple[Any, Any]) -> list[Tensor | None]:
    return [p.grad for layer in layers for p in layer.local.parameters()]


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def is_as_eager(build: Build, schedule: str = "gpipe") -> None:
    """The compiled step gives the values, gradients and state of the plain one."""
    plain, layers = ((Layer.on(0)(), Layer.on(1)()) for _ in range(2))
    expected = build(*plain)(X)
    compiled = cg.trace(build(*layers)).lower(X).compile(schedule=cg.schedules.by_name(schedule))
    torch.testing.assert_close(compiled(X), expected.detach(), rtol=1e-12, atol=0)
    for one, other in zip(gradients(layers), gradients(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for layer, same in zip(layers, plain, strict=True):
        assert layer.local.seen == pytest.approx(same.local.seen)


def train(first: Any, last: Any, between: Callable[[], None], method: str, n: int = 2) -> Any:
    def step(x: Tensor) -> Tensor:
        losses = [last.loss(getattr(first, method)(part)) for part in cg.microbatches(x, n)]
        between()
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step


def test_a_traced_write_to_what_a_backward_needs_is_refused() -> None:
    first, last = Layer.on(0)(), Layer.on(1)()

    def step(x: Tensor) -> Tensor:
        h = first.forward(x)
        loss = last.loss(h)  # the forward
        last.shrink()  # the write
        cg.backward(loss)
        return loss

    with pytest.raises(cg.TraceError, match=r"loss needs 'linear.weight' as its forward") as caught:
        cg.trace(step).lower(X)
    assert line_of("# the forward") in str(caught.value)
    assert line_of("# the write") in str(caught.value)
    assert "call cg.backward before" in str(caught.value)


def test_a_write_to_what_no_backward_needs_is_no_matter() -> None:
    is_as_eager(lambda first, last: train(first, last, last.shift, "forward"))


def test_a_buffer_that_is_replaced_is_kept_as_the_forward_saw_it() -> None:
    is_as_eager(lambda first, last: train(first, last, first.rescale, "scaled"))


def test_a_buffer_that_is_replaced_after_its_derivative_is_known() -> None:
    """The first backward looks the buffer up where it lives; the second must not."""

    def build(first: Any, last: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            cg.backward(last.loss(first.scaled(x)))
            loss = last.loss(first.scaled(x))
            first.rescale()
            cg.backward(loss)
            return loss

        return step

    is_as_eager(build)


@pytest.mark.parametrize(("schedule", "n"), [("gpipe", 2), ("zb-h1", 1)])
def test_an_opaque_call_in_between_that_changes_nothing(schedule: str, n: int) -> None:
    def build(first: Any, last: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            losses = []
            for part in cg.microbatches(x, n):
                h = first.forward(part)
                losses.append(last.loss(h))
            first.log(losses[0])
            last.log(losses[-1])
            loss = cg.mean(losses)
            cg.backward(loss)
            return loss

        return step

    is_as_eager(build, schedule)


@pytest.mark.parametrize("method", ["update", "renew"])
@pytest.mark.parametrize(("schedule", "n"), [("gpipe", 2), ("zb-h1", 1)])
def test_an_opaque_call_that_changes_what_a_backward_needs(
    method: str, schedule: str, n: int
) -> None:
    """Where an optimizer steps too early, eager PyTorch raises as well."""
    first, last = Layer.on(0)(), Layer.on(1)()
    for layer in (first, last):
        layer.local(X).sum().backward()  # so that there are gradients to step by
    step = cg.trace(train(first, last, getattr(last, method), "forward", n))
    compiled = step.lower(X).compile(schedule=cg.schedules.by_name(schedule))
    with pytest.raises(cg.RemoteError) as caught:
        compiled(X)
    message = str(caught.value)
    assert "the gradient of Layer.loss needs 'linear.weight' as its forward has seen it" in message
    assert f"@{last.name}.{method}" in message
    assert line_of("        between()") in message
    assert line_of("losses = [last.loss(getattr") in message
    assert "call cg.backward before" in message
    if method == "update":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step.__wrapped__(X)


def hiding(method: str) -> Build:
    def build(first: Any, last: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            factor = getattr(first, method)(x)
            factor = factor * 2 if method != "labels" else factor
            h = first.forward(x)
            loss = last.picked(h, factor) if method == "labels" else last.loss(h, factor)
            cg.backward(loss)
            return loss

        return step

    return build


def test_a_gradient_that_an_opaque_method_hides() -> None:
    first, last = Layer.on(0)(), Layer.on(1)()
    compiled = cg.trace(hiding("hidden")(first, last)).lower(X).compile()
    with pytest.raises(cg.RemoteError) as caught:
        compiled(X)
    message = str(caught.value)
    assert "a loss depends on what Layer.hidden returns, which requires a gradient" in message
    assert "x.detach()" in message
    assert line_of("factor = getattr(first, method)(x)") in message


@pytest.mark.parametrize("method", ["noise", "labels"])
def test_an_opaque_result_that_has_no_gradient(method: str) -> None:
    is_as_eager(hiding(method))


def test_a_gradient_that_goes_through_an_object() -> None:
    first, last = Layer.on(0)(), Layer.on(1)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = last.loss(first.forward(x), last.reveal(first.secret(), x))
        cg.backward(loss)
        return loss

    with pytest.raises(cg.RemoteError, match=r"what Layer.secret returns"):
        step(X)


def test_an_opaque_result_that_is_detached_in_the_step_or_in_no_loss() -> None:
    def build(first: Any, last: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                factor = first.hidden(x)
            loss = last.loss(first.forward(x), first.hidden(x).detach() + factor)
            cg.backward(loss)
            return loss + first.hidden(x).detach().sum()

        return step

    is_as_eager(build)
