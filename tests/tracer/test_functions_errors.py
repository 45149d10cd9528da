"""Errors of methods that cannot be traced: each has a line and a remedy."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from cg.ir.attributes import Effect
from cg.ir.location import Location
from cg.ir.ops.module import FunctionKind
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.values.interface import MethodTarget, TorchTarget
from cg.tracer.values.specs import ObjectSpec, Tree

from .function_tools import signature, trace, trace_vjp

pytestmark = pytest.mark.timeout(120)

OUTSIDE = torch.ones(3)
LEAKED: list[Any] = []
GENERATOR = torch.Generator()


class Scaled(torch.Tensor):
    """A tensor whose products with inputs are doubled."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if func is torch.nn.functional.linear else result


class Marked(torch.Tensor):
    """A tensor of a class without functions of its own."""


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def item(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def tolist(self, x: torch.Tensor) -> list[Any]:
        return list(x.tolist())

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    def asserts(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.allclose(x, x)
        return x

    def equal(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.equal(x, x) else -x

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x[0, 0])

    def to_int(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x[0, 0])

    def index(self, x: torch.Tensor) -> torch.Tensor:
        return x[range(3)[x[0, 0].long()]]

    def contains(self, x: torch.Tensor) -> torch.Tensor:
        return x if 1 in x else -x

    def numpy(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy())

    def asarray(self, x: torch.Tensor) -> torch.Tensor:
        return x * np.asarray(x).sum()

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def nonzero(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)

    def unique(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unique(x)

    def prints(self, x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x

    def formats(self, x: torch.Tensor) -> torch.Tensor:
        str(f"{x.sum():.2f}")
        return x

    def address(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.data_ptr() % 7)

    def closure(self, x: torch.Tensor) -> torch.Tensor:
        return x + OUTSIDE

    def closure_module(self, x: torch.Tensor) -> torch.Tensor:
        return OTHER(x)

    def generator(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, generator=GENERATOR)

    def python_random(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    def numpy_random(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand())

    def seeds(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return self.drop(x)

    def leaks_globally(self, x: torch.Tensor) -> torch.Tensor:
        LEAKED.append(x * 2)
        return x

    def rebinds_global(self, x: torch.Tensor) -> torch.Tensor:
        global LAST
        LAST = x * 2
        return x

    def returns_object(self, x: torch.Tensor) -> Holder:
        return Holder(x)

    def returns_outside(self, x: torch.Tensor) -> torch.Tensor:
        return OUTSIDE

    def returns_sparse(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[0, :2], (3,))

    def wrong_shape(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(3, 2))

    def good(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def takes(self, x: Any, masks: Any, extra: Any) -> Any:
        return x

    def dropout_in_checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda v: self.drop(self.linear(v)), x, use_reentrant=False, preserve_rng_state=False
        )

    def reentrant(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        return Nested.apply(x * 1, self.linear.bias)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            y = grad.detach().requires_grad_()
            (y * ctx.weight).sum().backward()
        return y.detach() * 2, None


OTHER = nn.Linear(3, 3)
LAST: Any = None
VALUE = "which is not known while tracing"

CASES = [
    (
        "item",
        f"Tensor.item() or Tensor.tolist() needs the value of a tensor, {VALUE}",
        "x.sum().item()",
    ),
    ("tolist", "Tensor.tolist() needs the value of a tensor", "x.tolist()"),
    ("branch", "a Python condition (if, while, assert", "if x.sum() > 0:"),
    ("asserts", "torch.allclose compares the values", "torch.allclose(x, x)"),
    ("equal", "torch.equal compares the values", "torch.equal(x, x)"),
    ("to_float", "float(tensor) needs the value", "float(x[0, 0])"),
    ("to_int", "int(tensor) needs the value", "int(x[0, 0])"),
    ("index", "as a Python index needs the value", "range(3)["),
    ("contains", "`in` on a tensor needs the value", "1 in x"),
    ("numpy", "Tensor.numpy() needs the value", "x.detach().numpy()"),
    ("asarray", "a NumPy function of a tensor needs the value", "np.asarray(x)"),
    ("mask", "depends on the values of a tensor (nonzero, a boolean mask", "x[x > 0]"),
    ("nonzero", "depends on the values of a tensor (nonzero", "torch.nonzero(x)"),
    ("unique", "depends on values", "torch.unique(x)"),
    ("prints", "prints or formats a tensor", "print(x)"),
    ("formats", "prints or formats a tensor", "{x.sum():.2f}"),
    ("address", "takes the address of a tensor", "x.data_ptr()"),
    ("closure", "neither an argument nor part of the actor", "x + OUTSIDE"),
    ("closure_module", "neither an argument nor part of the actor", "OTHER(x)"),
    ("generator", "takes a torch.Generator", "generator=GENERATOR"),
    ("python_random", "Python's random module", "return x * random.random()"),
    ("numpy_random", "NumPy's global generator", "def numpy_random"),
    ("seeds", "torch's global generator", "def seeds"),
    ("leaks_globally", "outside the actor, in 'LEAKED'", "def leaks_globally"),
    ("rebinds_global", "outside the actor, in 'LAST'", "def rebinds_global"),
    ("returns_object", "returns an object of type Holder", "def returns_object"),
    ("returns_outside", "returns a tensor that was made outside it", "def returns_outside"),
    ("returns_sparse", "returns a tensor of layout torch.sparse_coo", "def returns_sparse"),
]


@pytest.mark.parametrize(("method", "says", "line"), CASES)
def test_what_cannot_be_traced(method: str, says: str, line: str) -> None:
    actor = Actor()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    with pytest.raises(TraceError) as caught:
        trace(actor, method, torch.ones(2, 3))
    error = caught.value
    assert f"Actor.{method} cannot be traced: " in error.reason
    assert says in error.reason
    assert error.remedy
    assert line in source_line(error.loc)
    assert LEAKED == []
    assert LAST is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.loc) == (str(error), error.loc)


def source_line(loc: Location | None) -> str:
    assert loc is not None
    with open(loc.file, encoding="utf-8") as source:
        return source.readlines()[loc.line - 1]


def test_a_mistake_in_the_method_names_its_line() -> None:
    actor = nn.Sequential(Mistaken())
    with pytest.raises(TraceError, match="it raised RuntimeError: ") as caught:
        trace(actor, "forward", torch.ones(2, 3))
    assert "self.linear(x.t())" in source_line(caught.value.loc)


class Mistaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.t())


def test_random_numbers_in_the_backward() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert trace(Actor(), "dropout_in_checkpoint", x).declaration.random
    with pytest.raises(TraceError, match="that its forward has not drawn") as caught:
        trace_vjp(Actor(), "dropout_in_checkpoint", (0,), (0,), x)
    assert "preserve_rng_state" in caught.value.remedy
    assert "self.drop(self.linear(v))" in source_line(caught.value.loc)


def test_reentrant_checkpoint() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(TraceError, match="use_reentrant=False") as caught:
        trace_vjp(Actor(), "reentrant", (0,), (0,), x)
    assert "def reentrant" in source_line(caught.value.loc)


def test_work_on_gradients_in_a_backward() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(TraceError, match="it works on gradients") as caught:
        trace_vjp(Actor(), "nested", (0,), (0,), x)
    assert "def nested" in source_line(caught.value.loc)


def test_gradient_hooks_on_parameters() -> None:
    actor = Actor()
    actor.linear.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(TraceError, match=r"'linear\.weight' has a gradient hook"):
        trace_vjp(actor, "good", (0,), (), torch.ones(2, 3))


def test_a_method_that_takes_an_object_is_called_as_it_is() -> None:
    target = MethodTarget("actor", Actor(), "takes")
    _, spec = pytree.tree_flatten(((0, {"mask": 0}), {"extra": 0}))
    for i in range(3):
        values = tuple(ObjectSpec() if j == i else signature(1).leaves[0] for j in range(3))
        traced = Functions().trace(target, Tree(values, spec), "good", None)
        assert traced.declaration.kind is FunctionKind.OPAQUE
        assert traced.declaration.effect is Effect.WRITE
        assert traced.results.leaves == (ObjectSpec(),)


def test_a_method_that_does_not_exist() -> None:
    with pytest.raises(TraceError, match="Actor has no method 'missing'"):
        trace(Actor(), "missing", torch.ones(1))


def test_an_output_without_a_derivative() -> None:
    with pytest.raises(TraceError, match="output 0 does not depend on anything"):
        trace_vjp(nn.Flatten(), "forward", (0,), (), torch.ones(2, 3))


@pytest.mark.parametrize("function", [torch.Tensor.add_, torch.Tensor.copy_])
def test_functions_of_the_step_may_not_write_to_values(function: Callable[..., Any]) -> None:
    target = TorchTarget(function, "torch.add_")
    here = Location("train.py", 3)
    with pytest.raises(TraceError, match="writes in place to argument 0"):
        Functions().trace(target, signature(torch.ones(3), torch.ones(3)), "f", here)


def test_functions_of_the_step() -> None:
    x = torch.ones(3, requires_grad=True)
    target = TorchTarget(torch.mul, "torch.mul")
    traced = Functions().trace(target, signature(x, 3), "torch.mul", Location("train.py", 3))
    assert traced.declaration.actor is None
    assert traced.guard is None
    assert traced.body(torch.ones(3))[0].tolist() == [3, 3, 3]
    vjp = Functions().trace_vjp(target, signature(x, 3), "v", (0,), (0,), None)
    saved = vjp.first.only_body(torch.ones(3))[1:]
    assert saved == ()
    assert vjp.second.only_body(torch.ones(3))[0].tolist() == [3, 3, 3]


def test_tensors_with_functions_of_their_own_are_refused() -> None:
    """A fake has none of these functions."""
    actor, x = Actor(), torch.ones(2, 3)
    weight = actor.linear.weight.detach()
    expected = actor.linear(x)
    actor.linear.weight = nn.Parameter(weight.as_subclass(Scaled))
    assert not torch.equal(actor.linear(x).as_subclass(torch.Tensor), expected)
    with pytest.raises(TraceError, match="'weight' is a Scaled, a class of tensors") as error:
        trace(actor.linear, "forward", x)
    assert "keep it as a plain tensor" in str(error.value.remedy)
    trace(nn.Linear(3, 3), "forward", x)
    actor.linear.weight = nn.Parameter(weight.as_subclass(Marked))
    trace(actor.linear, "forward", x)
