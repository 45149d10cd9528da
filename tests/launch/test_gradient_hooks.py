"""Hooks on the gradients of parameters: those that a step runs, and those that it refuses.

A step runs the hooks behind the sum with the gradient of the batch, once a backward, as plain
PyTorch does. All others would see the gradient of each microbatch on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.attributes import Effect
from cg.ir.ops import Backward, Call
from cg.ir.ops.module import FunctionKind
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError


def node_of(parameter: nn.Parameter) -> Node:
    """The node that adds up a gradient; its hooks live as long as somebody holds it."""
    HELD.append(get_gradient_edge(parameter).node)
    return HELD[-1]


HELD: list[Node] = []
HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "of the tensor": lambda p: p.register_hook(lambda gradient: gradient * 2),
    "of several": lambda p: register_multi_grad_hook([p], lambda _: None),
    "of the node": lambda p: node_of(p).register_hook(lambda *_: None),
    "ahead of the node": lambda p: node_of(p).register_prehook(lambda *_: None),
}


class Stage(nn.Module):
    """A layer with an optimizer for each parameter, called by `update` or by hooks."""

    def __init__(self, hook: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        if hook is not None:
            HOOKS[hook](self.linear.weight)
        self.optimizers = [torch.optim.Adam([p], lr=0.1) for p in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


ROWS = {"loss(x)|forward(x)": cg.cut(0, "dp")}
PLACES: dict[str, Callable[[Any], list[Any]]] = {
    "another rank": lambda make: [make.on(1)],
    "a pipeline": lambda make: [make.on(0), make.on(1)],
    "dp": lambda make: [make.on(cg.mesh(dp=2), plan=ROWS)],
    "pieces along dp": lambda make: [
        make.on(cg.mesh(dp=2), plan=ROWS, store=cg.cut(0, "dp")),
    ],
    "tp": lambda make: [make.on(cg.mesh(tp=2), plan={"linear.*": cg.cut(0, "tp")})],
}


def step_of(stages: list[Any]) -> Any:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for rows in cg.microbatches(x, 2):
            h = rows
            for stage in stages[:-1]:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return step


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_constructor_are_refused(hook: str, place: str) -> None:
    with use_world(VirtualWorld(2)):
        makers = PLACES[place](cg.actor(Stage))
        for hooked in range(len(makers)):
            stages = [make(hook if i == hooked else None) for i, make in enumerate(makers)]
            with pytest.raises(TraceError, match=r"'linear\.weight' has a gradient hook") as caught:
                step_of(stages)(X)
            assert "a method that the step calls behind cg.backward" in caught.value.remedy
            assert "register_post_accumulate_grad_hook" in caught.value.remedy


def test_a_method_behind_the_backward_does_their_work() -> None:
    """It is equal to hooks of plain PyTorch that step and clear one parameter each."""
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES["a pipeline"](cg.actor(Stage))]
        step = step_of(stages)
        losses = [step(X) for _ in range(3)]
    assert_equal(losses, trained([Hooked() for _ in stages]))


class Hooked(Stage):
    """Steps and clears an optimizer for each parameter, in a hook.

    Args:
        work: done in place of that with the stage and a parameter.
    """

    def __init__(self, work: Callable[[Any, nn.Parameter], Any] | None = None) -> None:
        super().__init__()
        self.calls = 0
        by_parameter = dict(zip(self.parameters(), self.optimizers, strict=True))

        def hook(parameter: nn.Parameter) -> Any:
            self.calls += 1
            if work is not None:
                return work(self, parameter)
            by_parameter[parameter].step()
            return by_parameter[parameter].zero_grad()

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(hook)


def trained(stages: Sequence[Any], steps: int = 3, x: Tensor = X) -> list[Tensor]:
    """The losses of plain stages whose hooks update them."""
    losses = []
    for _ in range(steps):
        loss = nn.Sequential(*stages[:-1], Last(stages[-1]))(x)
        loss.backward()
        losses.append(loss.detach())
    return losses


class Last(nn.Module):
    """The loss of the last stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return self.stage.loss(x)


def assert_equal(losses: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for loss, plain in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, plain)


def backward_of(
    stages: list[Any], microbatches: int = 2, behind: Callable[[list[Any]], Any] = len
) -> Any:
    """A step that ends with a backward, and with what `behind` does with the stages."""

    @cg.trace
    def step(x: Tensor) -> tuple[Tensor, Any]:
        losses = []
        for rows in cg.microbatches(x, microbatches):
            h = rows
            for stage in stages[:-1]:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss, behind(stages)

    return step


def calls_of(stages: Sequence[Any]) -> list[int]:
    return [instance.calls for stage in stages for instance in stage.instances.values()]


@pytest.mark.parametrize("place", PLACES)
def test_hooks_run_once_a_backward_on_each_rank_that_has_the_parameter(place: str) -> None:
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES[place](cg.actor(Hooked))]
        step = backward_of(stages)
        losses = [step(X)[0] for _ in range(3)]
        assert set(calls_of(stages)) == {2 * 3}  # two parameters, three steps
    assert_equal(losses, trained([Hooked() for _ in stages]))


def test_a_call_of_hooks_is_recorded_behind_the_backward() -> None:
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES["dp"](cg.actor(Hooked))]
        module = backward_of(stages).lower(X).trace.module
        calls = [op.fn.name for op in module.program.ops if isinstance(op, Call)]
        at = next(i for i, op in enumerate(module.program.ops) if isinstance(op, Backward))
        behind = [op.fn.name for op in module.program.ops[at:] if isinstance(op, Call)]
    name = stages[0].name
    assert behind == [f"{name}.reduce_gradients", f"{name}.gradient_hooks"]
    assert len(calls) == len(set(calls)) + 1  # of the two microbatches
    function = module.functions[behind[1]]
    assert (function.kind, function.effect) == (FunctionKind.OPAQUE, Effect.WRITE)


SCHEDULES = {
    "one_f_one_b": [0, 1],
    "zb_h1": [0, 1],
    "interleaved": [0, 1, 0, 1],
    "zb_v": [0, 1, 1, 0],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_run_behind_all_tasks_of_a_schedule(schedule: str) -> None:
    ranks = SCHEDULES[schedule]
    with use_world(VirtualWorld(2)):
        stages = [cg.actor(Hooked).on(rank)() for rank in ranks]
        order = getattr(cg.schedules, schedule)()
        step = backward_of(stages, 4).lower(X).compile(schedule=order)
        losses = [step(X)[0] for _ in range(3)]
        assert set(calls_of(stages)) == {2 * 3}
    assert_equal(losses, trained([Hooked() for _ in ranks]))


def norms(stage: Any, parameter: nn.Parameter) -> None:
    """Halve the gradient, and update nothing: a clip behind the hook sees half of it."""
    assert parameter.grad is not None
    parameter.grad /= 2


@pytest.mark.parametrize("place", PLACES)
def test_a_norm_is_that_of_what_hooks_have_left(place: str) -> None:
    with use_world(VirtualWorld(2)):
        stages = [make(norms) for make in PLACES[place](cg.actor(Hooked))]
        step = backward_of(stages, 2, lambda stages: cg.clip_grad_norm(stages, 0.01))
        found = [step(X)[1] for _ in range(2)]
    plain = [Hooked(norms) for _ in stages]
    for norm in found:
        trained(plain, 1)
        parameters = [p for stage in plain for p in stage.parameters()]
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(parameters, 0.01))


def test_optimistic_steps_undo_what_hooks_have_done() -> None:
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES["a pipeline"](cg.actor(Halving))]
        step = backward_of(stages, 2, updated).lower(X).compile_optimistic()
        losses = [step(X)[0] for _ in range(2)]
        assert step.undone == 1
    plain = [Halving() for _ in stages]
    for loss in losses:
        torch.testing.assert_close(loss, trained(plain, 1)[0])
        nn.utils.clip_grad_norm_([p for stage in plain for p in stage.parameters()], 0.01)
        for stage in plain:
            stage.update()


class Halving(Hooked):
    """Counts in a parameter, and leaves the update to a method."""

    def __init__(self) -> None:
        super().__init__(norms)


def updated(stages: list[Any]) -> Any:
    norm = cg.clip_grad_norm(stages, 0.01)
    for stage in stages:
        stage.update()
    return norm


def again(stages: list[Any], x: Tensor) -> Tensor:
    """A second forward and a second backward, which see what the hooks have done."""
    first = stages[-1].loss(x)
    cg.backward(first)
    second = stages[-1].loss(x)
    cg.backward(second)
    return first + 2 * second


@pytest.mark.parametrize("place", [p for p in PLACES if p != "a pipeline"])
def test_each_backward_of_a_step_runs_them(place: str) -> None:
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES[place](cg.actor(Hooked))]
        step = cg.trace(lambda x: again(stages, x))
        losses = [step(X) for _ in range(2)]
    plain = [Hooked()]
    assert_equal(losses, [again(plain, X).detach() for _ in range(2)])


class Tied(Hooked):
    """A stage that has the weight, and its hook, of another."""

    def __init__(self, other: Hooked) -> None:
        super().__init__()
        self.linear.weight = other.linear.weight


def test_the_hook_of_a_parameter_that_two_actors_share_runs_once() -> None:
    with use_world(VirtualWorld(2)):
        first = cg.actor(Hooked).on(0)()
        stages = [first, cg.actor(Hooked).on(1)(), cg.actor(Tied).on(0)(first.local)]
        step = backward_of(stages)
        losses = [step(X)[0] for _ in range(3)]
        assert calls_of(stages) == [2 * 3, 2 * 3, 3]
    plain = [Hooked(), Hooked()]
    assert_equal(losses, trained([*plain, Tied(plain[0])]))


@pytest.mark.parametrize("stored", [{}, {"store": cg.cut(0, "dp")}])
def test_hooks_of_parameters_that_begin_on_the_meta_device(stored: dict[str, Any]) -> None:
    with use_world(VirtualWorld(2)):
        on = cg.actor(Hooked).on(cg.mesh(dp=2), plan=ROWS, init="meta", **stored)
        stages = [on()]
        step = backward_of(stages)
        before = step(X)[0]
        for _ in range(5):
            loss, _ = step(X)
        assert loss < before
        assert calls_of(stages) == [2 * 6, 2 * 6]


def clears(stage: Any, parameter: nn.Parameter) -> None:
    parameter -= 0.1 * parameter.grad
    parameter.grad = None


def test_a_hook_may_drop_the_gradient() -> None:
    with use_world(VirtualWorld(2)):
        stages = [make(clears) for make in PLACES["pieces along dp"](cg.actor(Hooked))]
        step = backward_of(stages)
        losses = [step(X)[0] for _ in range(3)]
        assert all(p.grad is None for p in stages[0].instances[0].parameters())
    assert_equal(losses, trained([Hooked(clears)]))


def raises(stage: Any, parameter: nn.Parameter) -> None:
    raise ArithmeticError("the hook has failed")


def test_a_hook_that_raises_ends_the_step() -> None:
    with use_world(VirtualWorld(2)):
        stages = [cg.actor(Hooked).on(0)(), cg.actor(Hooked).on(1)(raises)]
        with pytest.raises(cg.RemoteError, match="the hook has failed") as caught:
            backward_of(stages)(X)
        assert "in raises" in str(caught.value)
        assert "cg.backward(loss)" in str(caught.value)


def test_a_hook_that_returns_something_raises_as_in_torch() -> None:
    with use_world(VirtualWorld(2)):
        stages = [cg.actor(Hooked).on(0)(lambda *_: 3)]
        with pytest.raises(cg.RemoteError, match="returned a value of type int"):
            backward_of(stages)(X)
    with pytest.raises(TypeError):
        trained([Hooked(lambda *_: 3)], 1)


def normalizes(stage: Any, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad /= parameter.grad.norm()


def test_a_hook_on_pieces_works_element_by_element() -> None:
    with use_world(VirtualWorld(2)):
        stages = [make(normalizes) for make in PLACES["tp"](cg.actor(Hooked))]
        with pytest.raises(cg.RemoteError, match="which is not that of the whole"):
            backward_of(stages)(X)


def test_a_backward_of_one_microbatch_is_refused() -> None:
    with use_world(VirtualWorld(2)):
        stages = [cg.actor(Hooked).on(0)()]

        @cg.trace
        def step(x: Tensor) -> None:
            for rows in cg.microbatches(x, 2):
                cg.backward(stages[0].loss(rows))

        with pytest.raises(TraceError, match="in a loop over microbatches reaches") as caught:
            step(X)
        assert "behind it" in caught.value.remedy


def test_a_backward_between_hooks_and_their_update_is_refused() -> None:
    """As in plain PyTorch, where the update in place is an error of the second backward."""
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES["a pipeline"](cg.actor(Hooked))]

        @cg.trace
        def step(x: Tensor) -> None:
            losses = [stages[1].loss(stages[0].forward(x)) for _ in range(2)]
            for loss in losses:
                cg.backward(loss)

        with pytest.raises(cg.RemoteError, match="gradient_hooks"):
            step(X)
    plain = [Hooked(), Hooked()]
    both = [plain[1].loss(plain[0](X)) for _ in range(2)]
    both[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both[1].backward()


def test_an_optimizer_that_the_actor_does_not_hold_is_refused() -> None:
    class Apart(Stage):
        def __init__(self) -> None:
            super().__init__()
            held = {p: torch.optim.SGD([p], lr=0.1) for p in self.parameters()}
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: held[p].step())

    with use_world(VirtualWorld(2)):
        with pytest.raises(TraceError, match="uses SGD, which the actor does not hold") as caught:
            backward_of([cg.actor(Apart).on(1)()])(X)
        assert "self.optimizers" in caught.value.remedy


def test_files_have_the_optimizers_of_hooks(tmp_path: Path) -> None:
    with use_world(VirtualWorld(2)):
        (make,) = PLACES["pieces along dp"](cg.actor(Hooked))
        first, second = make(), make()
        steps = [backward_of([actor]) for actor in (first, second)]
        steps[0](X)
        cg.save(tmp_path / "file", {"": first})
        cg.load(tmp_path / "file", {"": second})
        for _ in range(2):
            torch.testing.assert_close(*(step(X)[0] for step in steps), rtol=0, atol=0)


def test_hooks_of_later_are_met_by_another_trace() -> None:
    with use_world(VirtualWorld(2)):
        stage = cg.actor(Stage).on(0)()
        step = backward_of([stage])
        step(X)
        seen: list[Tensor] = []
        weight = stage.local.linear.weight
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        with pytest.raises(RuntimeError, match=r"'linear\.weight' has a gradient hook now"):
            step(X)
        step.clear_cache()
        step(X)
        assert len(seen) == 1
        handle.remove()
        step(X)
        assert len(seen) == 1
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        step(X)
        assert len(seen) == 2
        weight.register_hook(lambda gradient: gradient)
        with pytest.raises(RuntimeError, match=r"'linear\.weight' has a gradient hook now"):
            step(X)


class Hooking(Stage):
    """Puts a hook on a parameter in each call."""

    def forward(self, x: Tensor) -> Tensor:
        HOOKS["of the tensor"](self.linear.weight)
        return super().forward(x)


class Doubled(torch.autograd.Function):
    """Does the work of that hook."""

    @staticmethod
    def forward(_: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Doubling(Stage):
    def forward(self, x: Tensor) -> Tensor:
        weight = Doubled.apply(self.linear.weight)
        return torch.tanh(nn.functional.linear(x, weight, self.linear.bias))


def test_a_method_that_hooks_a_parameter_and_what_does_its_work() -> None:
    with use_world(VirtualWorld(2)):
        (make,) = PLACES["dp"](cg.actor(Hooking))
        with pytest.raises(TraceError, match=r"puts a hook on the gradient of 'linear\.weight'"):
            step_of([make()])(X)
        (make,) = PLACES["dp"](cg.actor(Doubling))
        step = step_of([make()])
        losses = [step(X) for _ in range(2)]
    plain = Stage("of the tensor")
    for loss in losses:
        expected = plain.loss(X)
        expected.backward()
        plain.update()
        torch.testing.assert_close(loss, expected.detach())


BEHIND: dict[str, Callable[[nn.Parameter], Any]] = {
    "behind the sum": lambda p: p.register_post_accumulate_grad_hook(lambda _: None)
}


@pytest.mark.parametrize("hook", [*HOOKS, *BEHIND])
def test_a_model_with_hooks_is_not_cut(hook: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    handle = (HOOKS | BEHIND)[hook](model[1].weight)
    with pytest.raises(ValueError, match=r"'1\.weight' of Sequential has a gradient hook"):
        cg.cut_layers(model, 2, example={"input": X})
    handle.remove()
    cg.cut_layers(model, 2, example={"input": X})
