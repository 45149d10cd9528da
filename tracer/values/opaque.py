"""`@cg.opaque`: the mark of a method that is called as it is, never traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__cg_opaque__"


@dataclass(frozen=True, slots=True)
class OpaqueMark:
    """The mark of an opaque method, with what it returns as far as its author has said.

    Attributes:
        fake: takes the method's arguments (with `self`) as fake tensors and returns a pytree of
            fake tensors; leaves of other types stand for objects. None: the result is one object.
        returns: the method returns a sequence of this many objects. None: the result is one.
    """

    fake: Callable[..., Any] | None = None
    returns: int | None = None


@overload
def opaque(fn: F) -> F: ...
@overload
def opaque(
    fn: None = None, *, fake: Callable[..., Any] | None = None, returns: int | None = None
) -> Callable[[F], F]: ...
def opaque(
    fn: F | None = None,
    *,
    fake: Callable[..., Any] | None = None,
    returns: int | None = None,
) -> F | Callable[[F], F]:
    """Mark a method that is called as it is, on the live actor, and never traced.

    Such a method may do anything: use an optimizer, print, read files, branch on values. It
    counts as a write of the actor's state, so it keeps its place among the actor's calls. No
    gradient flows through it.

    It draws random numbers from its process's own generator: the numbers depend on how many ranks
    are in a process, and `state_dict()` does not keep them. Give the actor a `torch.Generator`, and
    save its state. On a mesh of ranks a draw without one is an error when it runs.

    Args:
        fn: the method, if the decorator is used without arguments.
        fake: for a method whose results are tensors that the step goes on to compute with: a
            function like `register_fake` of `torch.library` takes. It gets the method's own
            arguments, `self` included, tensors as fake tensors, and returns tensors of the
            right shapes and dtypes. Anything else that it returns stands for an object.
        returns: the number of objects that the method returns, if it is not one.

    Raises:
        ValueError: both `fake` and `returns` are given, or `returns` is negative.
        TypeError: it stands above `@staticmethod`, `@classmethod` or `@property`, or above what
            is no method, or `returns` is no integer.
    """
    if fake is not None and returns is not None:
        raise ValueError("@cg.opaque takes `fake` or `returns`, not both: `fake` says it all")
    if returns is not None and (isinstance(returns, bool) or not isinstance(returns, int)):
        raise TypeError(f"@cg.opaque(returns={returns!r}): it is the number of results, an int")
    if returns is not None and returns < 0:
        raise ValueError(f"@cg.opaque(returns={returns}): the number of results is not negative")

    def mark(method: F) -> F:
        if isinstance(method, (staticmethod, classmethod, property)):
            kind = type(method).__name__
            raise TypeError(f"write @cg.opaque below @{kind}, next to the function")
        if not callable(method):
            raise TypeError(f"cg.opaque marks a method, not {method!r}")
        setattr(method, _MARK, OpaqueMark(fake, returns))
        return method

    return mark if fn is None else mark(fn)


def opaque_mark(method: Callable[..., Any]) -> OpaqueMark | None:
    """The mark of a (bound) method, or None if it is to be traced."""
    mark = getattr(method, _MARK, None)
    return mark if isinstance(mark, OpaqueMark) else None
