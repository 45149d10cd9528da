"""Arguments that do not fit a method are an error when the call is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .step_tools import line_of


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the method an argument that its caller does not pass."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, 1, *args, **kwargs)

    return call


def passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    """Takes whatever it is given, and gives it to the method."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def scaled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Takes an argument more than the method."""

    @functools.wraps(method)
    def call(*args: Any, scale: int = 1) -> Any:
        return method(*args) * scale

    return call


@cg.actor
class Methods(torch.nn.Module):
    largest = max  # which has no signature

    def echo(self, x):
        return x

    @cg.opaque
    def marked(self, x):
        return x

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def shaped(self, x):
        return x

    def options(self, x, y=2, *, scale=1):
        return (x, y, scale)

    def named(self, x, *, key):
        return (x, key)

    def rest(self, x, *parts, **named):
        return (x, parts, named)

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x

    @counted
    def wrapped(self, number, x):
        return (number, x)

    @passed_on
    def passed(self, x):
        return x

    @scaled
    def scaled(self, x):
        return x

    @torch.no_grad()
    def without(self, x):
        return x

    @passed_on
    @torch.inference_mode()
    def inference(self, x):
        return x

    @functools.lru_cache  # noqa: B019
    def cached(self, x):
        return x

    @torch.compile(backend="eager")
    def compiled(self, x):
        return x + 1

    @passed_on
    def deep(self, x):
        return self.echo(x, x)

    def forward(self, x):
        return x


def traced(call: Callable[[Any, Any], Any], given: Any) -> Any:
    with use_world(VirtualWorld(2)):
        actor = Methods.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x):
            return call(actor, x)

        return step.lower(given).compile()(given if isinstance(given, torch.Tensor) else 5)


FITTING: list[tuple[Callable[[Any, Any], Any], Any]] = [
    (lambda a, x: a.echo(x=x), 5),
    (lambda a, x: a.options(x), (5, 2, 1)),
    (lambda a, x: a.options(x, 3, scale=4), (5, 3, 4)),
    (lambda a, x: a.named(x, key=x), (5, 5)),
    (lambda a, x: a.rest(x, x, 2, y=3), (5, (5, 2), {"y": 3})),
    (lambda a, x: a.static(x), 5),
    (lambda a, x: a.of_class(x), 5),
    (lambda a, x: a.wrapped(x), (1, 5)),
    (lambda a, x: a(x), 5),
    (lambda a, x: a.largest(x, 7), 7),
    (lambda a, x: a.scaled(x, scale=3), 15),
    (lambda a, x: a.inference(x), 5),
    (lambda a, x: a.cached(x=x), 5),
]


@pytest.mark.parametrize("index", range(len(FITTING)))
def test_arguments_that_fit(index: int) -> None:
    call, expected = FITTING[index]
    assert traced(call, cg.object) == expected


WRONG: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda a, x: a.echo(x, x), r"Methods.echo\(x\): too many positional arguments"),
    (lambda a, x: a.echo(x, y=1), r"Methods.echo\(x\): got an unexpected keyword argument 'y'"),
    (lambda a, x: a.marked(), r"Methods.marked\(x\): missing a required argument: 'x'"),
    (lambda a, x: a.shaped(x, x), r"Methods.shaped\(x\): too many positional arguments"),
    (lambda a, x: a.options(x, 1, 2), r"options\(x, y=2, \*, scale=1\): too many positional"),
    (lambda a, x: a.named(x), r"named\(x, \*, key\): missing a required .*'key'"),
    (lambda a, x: a.rest(y=x), r"rest\(x, \*parts, \*\*named\): missing a required .*'x'"),
    (lambda a, x: a.static(x, x), r"static\(x\): too many positional arguments"),
    (lambda a, x: a.of_class(), r"of_class\(x\): missing a required argument: 'x'"),
    (lambda a, x: a.without(x, y=1), r"without\(x\): got an unexpected keyword argument 'y'"),
    (lambda a, x: a.cached(), r"cached\(x\): missing a required argument: 'x'"),
    (lambda a, x: a.compiled(x, x), r"compiled\(x\): too many positional arguments"),
    (lambda a, x: a.__call__(x, x), r"Methods.__call__\(x\): too many positional arguments"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
@pytest.mark.parametrize("given", [cg.object, torch.ones(2)], ids=["object", "tensor"])
def test_arguments_that_do_not_fit(index: int, given: Any) -> None:
    call, message = WRONG[index]
    with pytest.raises(cg.TraceError, match=f"the arguments do not fit .*{message}") as caught:
        traced(call, given)
    assert line_of(caught.value).startswith("(lambda a, x: a.")
    assert "at " in caught.value.remedy
    assert __file__ in caught.value.remedy


BELOW: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda a, x: a.passed(), r"passed\(x\): missing 1 required positional argument: 'x'"),
    (lambda a, x: a.passed(x, y=1), r"passed\(x\): got an unexpected keyword argument 'y'"),
    (lambda a, x: a.scaled(x, x), r"scaled\(x\): takes 2 positional arguments but 3 were given"),
    (lambda a, x: a.inference(), r"inference\(x\): missing 1 required positional argument: 'x'"),
    (lambda a, x: a.wrapped(x, x), r"wrapped\(number, x\): takes 3 positional arguments but 4"),
]


@pytest.mark.parametrize("index", range(len(BELOW)))
def test_arguments_that_do_not_fit_below_a_decorator(index: int) -> None:
    """A decorator's call of the method shows what it makes of its arguments."""
    call, message = BELOW[index]
    with pytest.raises(cg.TraceError, match=f"the arguments do not fit .*{message}") as caught:
        traced(call, torch.ones(2))
    assert line_of(caught.value).startswith("(lambda a, x: a.")
    assert __file__ in caught.value.remedy


def test_a_call_inside_of_a_decorated_method_is_not_the_steps() -> None:
    with pytest.raises(cg.TraceError, match=r"cannot be traced: .*echo\(\) takes 2") as caught:
        traced(lambda a, x: a.deep(x), torch.ones(2))
    assert line_of(caught.value) == "return self.echo(x, x)"


def test_hooks_may_change_the_arguments_of_a_module() -> None:
    with use_world(VirtualWorld(1)):
        actor = Methods.on(0)()
        actor.local.register_forward_pre_hook(lambda module, args: args[:1])

        @cg.trace
        def step(x):
            return actor(x, x)

        assert step(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_torch_compile_has_made_is_looked_into() -> None:
    assert traced(lambda a, x: a.compiled(x), torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_compiled_module_is_looked_into() -> None:
    with use_world(VirtualWorld(1)):
        actor = Methods.on(0)()
        actor.local.compile(backend="eager")
        step = cg.trace(lambda x: actor(x))
        assert step(torch.ones(2)).tolist() == [1.0, 1.0]
