"""Steps whose own Python does too much, compiled in the virtual world: refused, or as eager is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cg
from cg.ir.text.diagnostics import IRError
from cg.tracer.errors import TraceError
from cg.tracer.record.session.inputs import InputError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is doubled: what a hook would do."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


@cg.actor
class SwallowingStage(nn.Module):
    """Methods that users write; some swallow the errors by which tracing refuses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1)
        self.steps = 0

    def forward(self, x: Any) -> Any:
        return self.linear(x)

    def doubled(self, x: Any) -> Any:
        return Doubled.apply(self.linear(x))

    def loss(self, x: Any) -> Any:
        return self.linear(x).square().mean()

    def mse(self, x: Any) -> Any:
        return nn.functional.mse_loss(self.linear(x), x)

    def sum_over_count(self, x: Any) -> Any:
        return (self.linear(x) - x).square().sum() / max(x.numel(), 1)

    def likelihood(self, x: Any) -> Any:
        normal = torch.distributions.Normal(self.linear(x), 1.0, validate_args=False)
        return -normal.log_prob(x).mean()

    def halves(self, x: Any) -> Any:
        return x / 2

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    @cg.opaque
    def update_scaled(self, scale: float) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        self.opt.step()
        self.opt.zero_grad()

    @cg.opaque
    def note(self) -> None:
        self.steps += 1

    def swallows(self, x: Any) -> Any:
        try:
            return x * float(x.sum())
        except Exception:
            return x * 0

    def swallows_a_mask(self, x: Any) -> Any:
        try:
            return x[x > 0].sum()
        except Exception:
            return x.sum()

    def swallows_and_steps(self, x: Any) -> Any:
        try:
            x = x * float(x.sum())
        except TraceError:
            x = x * 0
        self.opt.zero_grad()
        return x


@pytest.fixture
def stage() -> Any:
    return SwallowingStage.on(0)()


def refused(step: Callable[..., Any], *args: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        cg.trace(step)(*args)
    error = caught.value
    assert error.loc is not None
    assert error.loc.file == __file__
    assert error.remedy
    return error


def twins() -> tuple[Any, Any]:
    """Two actors with the same weights, one to compile, one to run eagerly."""
    return SwallowingStage.on(0)(), SwallowingStage.on(0)()


def weights(stage: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(stage.local.parameters())


# -- training in the step's own Python -------------------------------------------------------


def test_training_in_the_steps_own_python_is_refused(stage: Any) -> None:
    module = stage.local
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    adam = torch.optim.Adam(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(plain)

    def steps(x: Any) -> Any:
        loss = stage.loss(x)
        cg.backward(loss)
        plain.step()
        return loss

    def adam_steps(x: Any) -> Any:
        adam.step()
        return x

    def forgets(x: Any) -> Any:
        plain.zero_grad()
        return x

    def forgets_in_the_module(x: Any) -> Any:
        module.zero_grad()
        return x

    def clips(x: Any) -> Any:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        return x

    def sets(x: Any) -> Any:
        module.linear.weight.grad = None
        return x

    def schedules(x: Any) -> Any:
        schedule.step()
        return x

    def waits(x: Any) -> Any:
        plateau.step(1.0)
        return x

    for step, what in (
        (steps, "SGD.step() in a step"),
        (adam_steps, "Adam.step() in a step"),
        (forgets, ".grad of a tensor of a module in a step: zero_grad(), clip_grad_norm_()"),
        (forgets_in_the_module, ".grad of a tensor of a module in a step"),
        (clips, ".grad of a tensor of a module in a step"),
        (sets, "an assignment to .grad of a tensor of a module in a step"),
        (schedules, "step schedules changes 'schedule."),
        (waits, "step waits changes 'plateau."),
    ):
        error = refused(step, X)
        assert error.reason.startswith(what), error.reason
        assert "in an actor's method" in error.remedy
    assert schedule.last_epoch == 0


def test_training_in_methods_is_as_before(stage: Any) -> None:
    eager = SwallowingStage.on(0)()

    def step(stage: Any) -> Callable[[Any], Any]:
        def train(x: Any) -> Any:
            loss = stage.loss(x)
            cg.backward(loss)
            cg.clip_grad_norm([stage], 1.0)
            stage.update()
            return loss

        return train

    compiled = cg.trace(step(stage))
    for _ in range(3):
        assert torch.equal(compiled(X), step(eager)(X))
    assert torch.equal(weights(stage), weights(eager))
    other = torch.optim.SGD(stage.local.parameters(), lr=0.1)
    other.step()  # the guard is gone with the trace


# -- swallowed refusals ------------------------------------------------------------------------


def test_a_method_cannot_swallow_a_refusal(stage: Any) -> None:
    error = refused(lambda x: stage.swallows(x), X)
    assert "float(tensor) needs the value of a tensor" in error.reason
    assert (
        "depends on the values of a tensor" in refused(lambda x: stage.swallows_a_mask(x), X).reason
    )


def test_what_runs_as_it_is_may_swallow(stage: Any) -> None:
    def step(x: Any) -> Any:
        return stage.swallows_and_steps(x)

    assert torch.equal(cg.trace(step)(X), X * float(X.sum()))


def test_a_step_cannot_swallow_what_a_method_cannot_do(stage: Any) -> None:
    def step(x: Any) -> Any:
        try:
            return stage.swallows(x)
        except TraceError:
            return stage.forward(x)

    assert "float(tensor)" in refused(step, X).reason


# -- torch's modes -----------------------------------------------------------------------------


def test_autocast_around_every_call_is_refused(stage: Any) -> None:
    @cg.trace
    def step(x: Any) -> Any:
        return stage.forward(x)

    expected = step(X)
    compiled = step.lower(X).compile()
    message = re.escape("step() is called under torch.autocast, which does not reach into a comp")
    for call in (step, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match=message):
            call(X)
        assert torch.equal(call(X), expected)


class DoublingFunctions(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


class DoublingOperators(TorchDispatchMode):
    """Doubles what is added up by linear layers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


def test_a_mode_of_functions_around_every_call_is_refused(stage: Any) -> None:
    @cg.trace
    def step(x: Any) -> Any:
        return stage.forward(x)

    expected = step(X)
    compiled = step.lower(X).compile()
    for call in (step, compiled):
        with DoublingFunctions(), pytest.raises(InputError, match="under the mode Doubling"):
            call(X)
        assert torch.equal(call(X), expected)


@pytest.mark.parametrize("mode", [DoublingFunctions, DoublingOperators])
def test_a_step_is_not_traced_under_a_mode(stage: Any, mode: Any) -> None:
    """It would be in the graph, of which another start could take it without the mode."""

    def method(x: Any) -> Any:
        return stage.forward(x)

    def function(x: Any) -> Any:
        return torch.nn.functional.linear(x, x)

    def inside(x: Any) -> Any:
        with mode():
            return stage.forward(x)

    for step in (method, function):
        with mode():
            assert f"is called under the mode {mode.__name__}" in refused(step, X).reason
    assert f"is called under the mode {mode.__name__}" in refused(inside, X).reason


def test_the_default_dtype_is_part_of_the_signature(stage: Any) -> None:
    @cg.trace
    def step(numbers: Any) -> Any:
        return torch.ones(4), stage.halves(numbers)

    numbers = torch.arange(4)
    single = step(numbers)
    compiled = step.lower(numbers).compile()
    torch.set_default_dtype(torch.float64)
    try:
        double = step(numbers)
        for value, eager in zip(double, step.__wrapped__(numbers), strict=True):
            assert value.dtype is eager.dtype is torch.float64
            assert torch.equal(value, eager)
        with pytest.raises(InputError, match="under the default dtype torch"):
            compiled(numbers)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [value.dtype for value in single] == [torch.float32] * 2
    assert all(map(torch.equal, compiled(numbers), single))


def test_one_step_has_one_default_dtype(stage: Any) -> None:
    def step(x: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return stage.halves(x)
        finally:
            torch.set_default_dtype(torch.float32)

    error = refused(step, X)
    assert "is called under the default dtype torch.float64, and the step began" in error.reason


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("entered", [torch.device, default_device])
def test_a_step_is_compiled_for_each_default_device(stage: Any, entered: Any) -> None:
    @cg.trace
    def step(x: Any) -> Any:
        return stage.forward(x)

    expected = step(X)
    with entered("meta"):
        assert torch.equal(step(X), expected)
        assert torch.equal(step(X), expected)
    assert torch.equal(step(X), expected)
    assert repr(step) == "<cg.Step step: compiled for 2 signatures>"


@pytest.mark.parametrize("entered", [torch.device, default_device])
def test_one_step_has_one_default_device(stage: Any, entered: Any) -> None:
    def step(x: Any) -> Any:
        with entered("meta"):
            return stage.forward(x)

    error = refused(step, X)
    assert "is called under the default device meta, and the step began under cpu" in error.reason


def test_modes_that_act_when_the_step_runs(stage: Any) -> None:
    @cg.trace
    def step(x: Any) -> Any:
        with torch.no_grad():
            return stage.forward(x)

    expected = step(X)
    with torch.inference_mode():
        assert torch.equal(step(X), expected)
        assert step(X).is_inference()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(step(X), step.__wrapped__(X))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    with torch.device("cpu"):  # the host is the default device as it is
        assert torch.equal(cg.trace(lambda x: stage.forward(x))(X), expected)


# -- lazy conjugates, and views that a step gets as copies -------------------------------------


def test_lazy_conjugates_are_resolved() -> None:
    z = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))

    @cg.trace
    def step(z: Any) -> Any:
        return z.conj().imag, torch.view_as_real(z.conj().resolve_conj()) + 1, z[None].mH

    for given in (z, z.conj()):
        for value, eager in zip(step(given), step.__wrapped__(given), strict=True):
            assert torch.equal(value, eager)


def test_a_view_that_is_not_dense_is_still_a_view() -> None:
    def step(x: Any) -> Any:
        h = x + 1
        turned = h.T
        h += 1
        return turned * 1

    assert "is a view of another value or has views" in refused(step, X).reason


# -- schedules -----------------------------------------------------------------------------------


def over_all(first: Any, last: Any, x: Any) -> Any:
    parts = [last.forward(first.forward(part)) for part in cg.microbatches(x, 4)]
    loss = last.loss(torch.cat(parts))
    cg.backward(loss)
    return loss


def with_notes(first: Any, last: Any, x: Any) -> Any:
    losses = []
    for part in cg.microbatches(x, 4):
        last.note()
        losses.append(last.loss(first.forward(part)))
    loss = cg.mean(losses)
    cg.backward(loss)
    return loss


@pytest.mark.parametrize("body", [over_all, with_notes])
@pytest.mark.parametrize("costs", [None, cg.Costs()])
def test_auto_falls_back_with_a_word(body: Any, costs: Any) -> None:
    actors, eager = twins(), twins()

    def step(x: Any) -> Any:
        return body(*actors, x)

    lowered = cg.trace(step).lower(X)
    with pytest.warns(UserWarning, match="with the schedule 'gpipe' instead of 'auto', which") as w:
        compiled = lowered.compile(schedule=cg.schedules.auto(costs=costs))
    assert w[0].filename == __file__  # where `compile` is called
    assert __file__ in str(w[0].message)
    torch.testing.assert_close(compiled(X), body(*eager, X))
    for one, other in zip(actors, eager, strict=True):
        assert one.local.steps == other.local.steps
        for mine, its in zip(one.local.parameters(), other.local.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    with pytest.raises(IRError, match="schedule 'auto' cannot run this step"):
        lowered.compile(schedule=cg.schedules.auto(max_activations=2))


def test_a_loop_carried_dependency_is_named() -> None:
    first, last = twins()

    def carried(parts: Any, detach: bool = False) -> Any:
        h = torch.zeros(2, 4)
        for part in parts:
            h = last.forward(first.forward(part + (h.detach() if detach else h)))
        loss = h.mean()
        cg.backward(loss)
        return loss

    def recurrence(x: Any) -> Any:
        return carried(cg.microbatches(x, 4))

    def chunks(x: Any) -> Any:
        return carried(x.chunk(4))

    def detached(x: Any) -> Any:
        return carried(cg.microbatches(x, 4), detach=True)

    for schedule in (cg.schedules.auto(), cg.schedules.gpipe()):
        with pytest.raises(IRError) as caught:
            cg.trace(recurrence).lower(X).compile(schedule=schedule)
        text = str(caught.value)
        assert re.search(r"microbatch 1 uses %\S+, which microbatch 0 makes", text)
        assert "h = last.forward(first.forward(part + (h.detach() if detach else h)))" in text
        assert "loop over x.chunk(n) instead of cg.microbatches(x, n)" in text
    compiled = cg.trace(chunks).lower(X).compile(schedule=cg.schedules.auto())
    torch.testing.assert_close(compiled(X), chunks(X))
    compiled = cg.trace(detached).lower(X).compile(schedule=cg.schedules.gpipe())
    torch.testing.assert_close(compiled(X), detached(X))


# -- remedies that work --------------------------------------------------------------------------


def test_a_hook_on_a_value_and_what_does_its_work() -> None:
    stage, eager = twins()

    def hooked(x: Any) -> Any:
        h = stage.forward(x)
        h.register_hook(lambda gradient: gradient * 2)
        cg.backward(h.sum())

    assert "apply a torch.autograd.Function" in refused(hooked, X).remedy

    @cg.trace
    def step(x: Any) -> Any:
        cg.backward(stage.doubled(x).sum())

    step(X)
    h = eager.local(X)
    h.register_hook(lambda gradient: gradient * 2)
    h.sum().backward()
    assert torch.equal(stage.local.linear.weight.grad, eager.local.linear.weight.grad)


def test_a_grad_scaler_and_what_does_its_work() -> None:
    stage, eager = twins()
    scaler = torch.amp.GradScaler("cpu")

    def scaled(x: Any) -> Any:
        cg.backward(scaler.scale(stage.loss(x)))

    assert "called by a GradScaler" in refused(scaled, X).reason
    assert scaler._scale is None
    scaler.scale(torch.ones(()))
    error = refused(scaled, X)
    assert "called by a GradScaler" in error.reason
    assert "cg.backward(loss * scale)" in error.remedy

    @cg.trace
    def step(x: Any) -> Any:
        loss = stage.loss(x)
        cg.backward(loss * 1024.0)
        stage.update_scaled(1024.0)
        return loss

    assert torch.equal(step(X), eager.local.loss(X))
    eager.local.loss(X).backward()
    eager.update()
    torch.testing.assert_close(weights(stage), weights(eager))


def test_torch_cond_and_what_does_its_work(stage: Any) -> None:
    def branches(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    error = refused(branches, X)
    assert "calls torch.cond" in error.reason
    assert "torch.where" in error.remedy

    def where(x: Any) -> Any:
        return torch.where(x.sum() > 0, x + 1, x - 1)

    assert torch.equal(cg.trace(where)(X), where(X))


def test_a_mean_over_nothing_and_what_gives_zero(stage: Any) -> None:
    nothing = torch.empty(0, 4)

    def step(method: Any) -> Callable[[Any], Any]:
        def losses(x: Any) -> Any:
            loss = cg.mean([method(part) for part in cg.microbatches(x, 2)])
            cg.backward(loss)
            return loss

        return losses

    error = refused(step(stage.mse), nothing)
    assert "it raised ZeroDivisionError" in error.reason
    assert "empty batch" in error.remedy
    assert cg.trace(step(stage.sum_over_count))(nothing) == 0


def test_copies_of_values_and_what_makes_them(stage: Any) -> None:
    error = refused(lambda x: copy.deepcopy([stage.forward(x)]), X)
    assert "use value.clone(), and copy containers item by item" in error.remedy

    def clones(x: Any) -> Any:
        return [value.clone() for value in [stage.forward(x)]]

    assert torch.equal(cg.trace(clones)(X)[0], stage.local(X))

    def copies(x: Any) -> Any:
        return copy.deepcopy(stage.note())

    assert "a copy of %note" in refused(copies, X).reason


def test_distributions_and_what_makes_them_work(stage: Any) -> None:
    torch.distributions.Distribution.set_default_validate_args(True)

    def step(x: Any, **options: Any) -> Any:
        return torch.distributions.Normal(stage.forward(x), 1.0, **options).log_prob(x).mean()

    error = refused(step, X)
    assert "is called by torch.distributions, which checks elements" in error.reason
    assert "validate_args=False" in error.remedy

    def unchecked(x: Any) -> Any:
        return step(x, validate_args=False), stage.likelihood(x)

    for value, eager in zip(cg.trace(unchecked)(X), unchecked(X), strict=True):
        assert torch.equal(value, eager)
