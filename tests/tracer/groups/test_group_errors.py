"""Errors of actors on meshes name the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cg

from ...worlds import virtual_world


@cg.actor
class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4)) if weight is None else weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def loss(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum()

    def penalty(self) -> Tensor:
        return self.weight.square().sum()

    def itself(self) -> Tensor:
        return self.weight

    def same(self, x: Tensor) -> Tensor:
        return x

    @cg.opaque
    def update(self) -> None:
        with torch.no_grad():
            self.weight.sub_(1)

    def count(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum(0)
        return x


_world = virtual_world(4)


X = torch.ones(4, 4)
ROWS = cg.cut(0, "dp")


def on(plan: dict[str, Any] | None = None, **axes: int) -> Any:
    return Layer.on(cg.mesh(**(axes or {"dp": 2, "tp": 2})), plan=plan)()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: on({"weight": cg.cut(0, "ep")}),
            "'weight' is cut along 'ep', but the mesh dp=2, tp=2 of ranks {0..3} has none",
        ),
        (
            lambda: on({"weight": cg.cut(0, "tp") & cg.cut(1, "tp")}),
            "'weight' is cut along 'tp' twice",
        ),
        (
            lambda: on({"wieght": cg.cut(0, "tp")}),
            "the plan's pattern 'wieght' matches nothing of Layer; its tensors are weight, seen",
        ),
        (
            lambda: on({"forward(y)": ROWS}),
            "the plan's pattern 'forward(y)' matches nothing of Layer; its arguments are "
            "forward(x), count(x), loss(x), same(x)",
        ),
        (
            lambda: on({"weight": cg.cut(2, "tp")}),
            "'weight' has 2 dimensions, so dimension 2 cannot be cut; those that can are [0, 1]",
        ),
        (
            lambda: on({"weight": cg.cut(0, "tp", blocks=3)}),
            "'weight' has 4 entries in dimension 0, which are not 3 blocks of equal size",
        ),
        (
            lambda: on(dp=5),
            "Layer.on(the mesh dp=5 of ranks {0..4}): the world has ranks 0..3; start more",
        ),
        (
            lambda: on(dp=2).forward(X),
            "forward was called outside of a step, but",
        ),
        (
            lambda: on(dp=2).rank,
            "is on the mesh dp=2 of ranks {0..1}; ask for",
        ),
        (
            lambda: on(dp=2).local,
            "this process plays ranks [0, 1] of",
        ),
    ],
    ids=lambda value: "" if callable(value) else value[:30],
)
def test_actors_that_cannot_be_made_or_used(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        make()
    assert message in str(caught.value)


def test_a_fake_tensor_is_no_tensor_of_an_actor() -> None:
    """A copy of it for another rank would free memory that is in use."""
    with FakeTensorMode():
        fake = nn.Parameter(torch.empty(4, 4))
    with pytest.raises(cg.ActorError, match=r"'weight' is a fake tensor.* keep a real tensor"):
        Layer.on(cg.mesh(dp=2))(fake)  # type: ignore[attr-defined]


def test_actors_on_meshes_share_no_tensor() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    first = Layer.on(0)(weight)  # type: ignore[attr-defined]
    with pytest.raises(cg.ActorError) as caught:
        Layer.on(cg.mesh(dp=2))(weight)  # type: ignore[attr-defined]
    assert f"and {first.name} hold one tensor, 'weight'" in str(caught.value)
    assert "copy.deepcopy" in str(caught.value)


def laid_out_and_not_named() -> Any:
    first, second = on({"forward(x)": ROWS}), on()
    return lambda x: second.forward(first.forward(x))


def an_argument_without_the_dimension() -> Any:
    layer = on({"forward(x)": cg.cut(3, "dp")})
    return lambda x: layer.forward(x)


def an_argument_of_an_axis_that_is_not_there() -> Any:
    layer = on({"forward(x)": cg.cut(0, "ep")})
    return lambda x: layer.forward(x)


def replaces_a_buffer() -> Any:
    layer = on({"weight": cg.cut(0, "tp")})
    return lambda x: layer.count(x)


def two_meshes() -> Any:
    first, second = on({"forward(x)": ROWS}), on({"forward(x)": ROWS}, dp=2)
    return lambda x: first.forward(x) + second.forward(x)


def sums_along_other_axes() -> Any:
    layer = on({"forward(x)": cg.cut(0, "dp"), "loss(x)": cg.cut(0, "tp")})

    def step(x: Tensor) -> None:
        cg.backward(layer.loss(layer.forward(x)))

    return step


def a_gradient_that_is_not_cut_as_its_tensor() -> Any:
    return graded(on({"loss(x)": cg.cut(1, "tp")}))


def graded(layer: Any) -> Callable[[Tensor], None]:
    """A step with a backward."""
    return lambda x: cg.backward(layer.loss(x))


def rows_of_a_cut_value() -> Any:
    layer = on({"forward(x)": ROWS})
    return lambda x: layer.forward(x)[1:3].sum()


def a_penalty_that_takes_no_batch() -> Any:
    layer = on({"loss(x)": ROWS})

    def step(x: Tensor) -> None:
        cg.backward(layer.loss(x) + layer.penalty())

    return step


def state_that_has_been_updated_since() -> Any:
    layer = on({"loss(x)": ROWS, "weight": cg.cut(0, "tp")})

    def step(x: Tensor) -> Tensor:
        weight = layer.itself()
        cg.backward(layer.loss(x))
        layer.update()
        return weight.sum()

    return step


def a_write_to_a_view_of_a_cut_value() -> Any:
    layer = on({"forward(x)": ROWS})

    def step(x: Tensor) -> Tensor:
        made = layer.forward(x)
        made.t().mul_(2)
        return made.sum()

    return step


def a_write_to_what_a_method_has_passed_on() -> Any:
    layer = on({"forward(x)|same(x)": ROWS})

    def step(x: Tensor) -> Tensor:
        made = layer.forward(x)
        layer.same(made).add_(1)
        return made.sum()

    return step


def a_write_to_what_another_mesh_has_passed_on() -> Any:
    layer, other = Layer.on(0)(), on({"same(x)": ROWS})  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        made = layer.forward(x)
        other.same(made).add_(1)
        return made.sum()

    return step


STEPS = [
    (laid_out_and_not_named, "the actor's plan does not say how forward(x) is laid out"),
    (an_argument_without_the_dimension, "has 2 dimensions, so dimension 3 cannot be cut"),
    (an_argument_of_an_axis_that_is_not_there, "is cut along 'ep', but the mesh"),
    (replaces_a_buffer, "it changes 'seen', and its actor is on a mesh"),
    (two_meshes, "pass one of them through a method of an actor on the other one's mesh"),
    (sums_along_other_axes, "is a sum along tp in one of its methods, and along dp in another"),
    (state_that_has_been_updated_since, "has been written to since: plain Python would see the"),
    (a_write_to_a_view_of_a_cut_value, "is a view of another value or has views"),
    (a_write_to_what_a_method_has_passed_on, "is a view of another value or has views"),
    (a_write_to_what_another_mesh_has_passed_on, "is a view of another value or has views"),
    (rows_of_a_cut_value, "would have to be gathered: dimension 0 of"),
    (a_penalty_that_takes_no_batch, "is a sum along no axis in one of its methods, and along dp"),
    (a_gradient_that_is_not_cut_as_its_tensor, "the backward makes the gradient of 'weight' as"),
]


@pytest.mark.parametrize(("build", "message"), STEPS, ids=[each.__name__ for each, _ in STEPS])
def test_steps_that_cannot_be_traced(build: Callable[[], Any], message: str) -> None:
    step = build()
    with pytest.raises(cg.TraceError) as caught:
        cg.trace(step).lower(X)
    assert message in str(caught.value)
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__
    assert "help:" in str(caught.value)


def test_a_gradient_that_is_not_cut_as_its_tensor_names_the_cut() -> None:
    """Where the plan has what the error says, the gradient is that of one process."""
    plan = {"loss(x)": cg.cut(1, "tp")}
    with pytest.raises(cg.LayoutError) as caught:
        cg.trace(graded(on(plan))).lower(X)
    assert "'weight' is f32[4,4], and its gradient would have to be gathered" in str(caught.value)
    said = re.fullmatch(r'.*: "(?P<path>.+)": cg.cut\(1, "tp"\)', caught.value.remedy or "")
    assert said is not None
    layer, plain = on(plan | {said["path"]: cg.cut(1, "tp")}), Layer()
    cg.trace(graded(layer))(X)
    plain.loss(X).backward()
    for rank, piece in layer.instances.items():
        columns = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        assert torch.equal(piece.weight.grad, plain.weight.grad[:, columns])
