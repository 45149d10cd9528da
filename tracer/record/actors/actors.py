"""Handles of actors, which every rank has, and the methods that a step calls on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from ....ir.ops.module import FunctionKind
from ....ir.types import Place
from ...errors import TraceError
from ...method.float8.eager import computing_in_float8
from ...source import caller_location
from ...values.float8_layers import Float8Layers, Float8Use
from ...values.group import Group, GroupActor
from ...values.holdings import Actors, Member
from ...values.interface import MethodTarget, Peers
from ...values.mesh import describe
from ...values.optimizer_state import RestingState
from ...values.sharing import find_sharing
from ...values.values import NotAValue
from ..groups.gradient_sums import reduce_gradients
from ..groups.group_calls import bring, gather
from ..session.arguments import take_apart
from ..session.calls import find_or_declare, record
from ..session.session import Session, recording


class ActorError(RuntimeError):
    """An actor was made or used where this is not possible."""

    __module__ = "cg"  # the public name, which tracebacks show


class _Elsewhere:
    """Stands for an instance that another process holds."""


ELSEWHERE = _Elsewhere()


class ActorHandle(NotAValue):
    """The handle of an actor, which every rank holds and a step calls.

    In a step, each rank records a method call. Outside of steps, a method call runs in plain
    Python, and only on the rank where the actor lives.

    Attributes:
        name: the name of the actor's class in lower case, and a number.
        place: the rank where the actor lives, or the mesh whose ranks hold its pieces.
        cls: the actor's class.
    """

    __slots__ = (
        *("__weakref__", "_actors", "_float8", "_group", "_instance", "_member", "_methods"),
        *("_peers", "_rank", "_resting", "cls", "name", "place"),
    )

    what_it_is = "an actor, which is not a value"

    def __init__(
        self,
        name: str,
        rank: int,
        cls: type[Any],
        peers: Peers,
        instance: object,
        actors: Actors | None = None,
        group: GroupActor | None = None,
        float8: tuple[Float8Layers, ...] = (),
        resting: Mapping[int, RestingState] | None = None,
    ) -> None:
        self.name = name
        self.cls = cls
        self.place: Place = Place.of(rank) if group is None else group.mesh
        self._rank = rank
        self._group = group
        self._float8 = Float8Use(float8) if float8 else None
        self._resting = {} if resting is None else resting
        self._peers = peers
        self._instance = instance
        self._methods: dict[str, ActorMethod] = {}
        self._actors = Actors(member_of) if actors is None else actors
        instances = (instance,) if self.is_local else ()
        self._member = Member(name, rank, peers, instances, group=group)
        self._actors.enter(self._member)

    @property
    def rank(self) -> int:
        """The rank where the actor lives.

        Raises:
            ActorError: the actor is on a mesh of several ranks.
        """
        if not self.place.is_single:
            raise ActorError(f"{self.name} is on {self._where}; ask for {self.name}.place.ranks")
        return self._rank

    @property
    def instances(self) -> Mapping[int, Any]:
        """The instances by rank, for the ranks of the actor that this process plays.

        The instances of an actor on a mesh hold pieces of its tensors.
        """
        if self._group is not None:
            return self._group.instances
        return {self._rank: self._instance} if self.is_local else {}

    @property
    def is_local(self) -> bool:
        """True if this process holds the instance, or an instance of a rank of the mesh."""
        return self._instance is not ELSEWHERE

    @property
    def local(self) -> Any:
        """The instance itself; for an actor on a mesh, the instance with this rank's pieces.

        Raises:
            ActorError: another process holds it, or this process plays several ranks of the mesh.
        """
        if self._instance is ELSEWHERE:
            raise ActorError(
                f"{self.name} lives on {self._where}, this is rank {self._peers.rank}; "
                f"ask for {self.name}.local only where {self.name}.is_local"
            )
        if self._group is not None and len(self._group.instances) > 1:
            raise ActorError(
                f"this process plays ranks {list(self._group.instances)} of {self.name}, each with "
                f"pieces of its own; ask for {self.name}.instances[rank]"
            )
        return self._instance

    @property
    def _where(self) -> str:
        return f"rank {self._rank}" if self._group is None else describe(self._group.mesh)

    def __getattr__(self, name: str) -> ActorMethod:
        methods = self._methods
        method = methods.get(name)
        if method is None:
            if not _is_method(self.cls, name):
                raise self._no_method(name)
            method = methods[name] = ActorMethod(self, name)
        return method

    def _no_method(self, name: str) -> AttributeError:
        methods = ", ".join(_methods_of(self.cls)) or "none"
        known = hasattr(self.cls, name)
        problem = f"'{name}' is not a method of" if known else f"no method '{name}' in"
        return AttributeError(
            f"{problem} the actor {self.name}; the methods of {self.cls.__name__} are: {methods}. "
            "Attributes live with the instance: read them in a method, or, outside of steps and "
            f"on {self._where}, from {self.name}.local"
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the actor itself, as in `stage(x)`."""
        if not _is_method(self.cls, "__call__"):
            raise TypeError(
                f"{self.name} cannot be called, {self.cls.__name__} has no __call__; call one of "
                f"its methods: {', '.join(_methods_of(self.cls))}"
            )
        return self.__getattr__("__call__")(*args, **kwargs)

    def __repr__(self) -> str:
        where = "here" if self.is_local else "elsewhere"
        return f"<actor {self.name}: {self.cls.__name__} on {self._where}, {where}>"

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorHandle:
        if isinstance(memo, ReplicaMemo):
            return self
        raise TypeError(
            f"the actor {self.name} cannot be copied: both handles would be of one instance. Make "
            f"another by {self.cls.__name__}.on(...)(...), and where it lives call "
            f"other.local.load_state_dict({self.name}.local.state_dict())"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the handle of {self.name} belongs to this process and cannot be pickled; save what "
            f"{self.name}.local holds instead, for example its state_dict()"
        )


class ReplicaMemo(dict[int, Any]):
    """The memo of a deep copy of an instance for another rank, which holds the same actors."""


RESERVED = {"name", "rank", "cls", "place", "local", "is_local", "instances"}


class ActorMethod(NotAValue):
    """A method of an actor, which a step or plain Python calls.

    Attributes:
        handle: the actor's handle.
        name: the method's name.
        shown: the method's name in messages.
        remat: whether the backward computes the forward again, as with `cg.remat`.
        function: a function of cg that takes the instance first, in place of the actor's method.
    """

    __slots__ = ("_rematerialized", "function", "handle", "name", "remat", "shown")

    what_it_is = "a method of an actor, which is not a value"

    def __init__(
        self,
        handle: ActorHandle,
        name: str,
        remat: bool = False,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.handle = handle
        self.name = name
        self.shown = f"{handle.name}.{name.strip('_') or name}"
        self.remat = remat
        self.function = function
        self._rematerialized: ActorMethod | None = self if remat else None

    @property
    def rematerialized(self) -> ActorMethod:
        """The same method with `remat`; each access gives the same object."""
        if self._rematerialized is None:
            self._rematerialized = ActorMethod(self.handle, self.name, remat=True)
        return self._rematerialized

    def __repr__(self) -> str:
        return f"<method {self.shown}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        session = recording(f"a call of {self.shown}")
        if session is not None:
            return _call(session, self, args, kwargs)
        handle = self.handle
        if not handle.is_local:
            raise ActorError(
                f"{self.shown} was called outside of a step, but {handle.name} lives on "
                f"{handle._where} and this is rank {handle._peers.rank}; call it in a step "
                f"(@cg.trace), or only where {handle.name}.is_local"
            )
        if not handle.place.is_single:
            raise ActorError(
                f"{self.shown} was called outside of a step, but {handle.name} is on "
                f"{handle._where}, and no rank holds all of it; call it in a step (@cg.trace)"
            )
        if self.function is not None:
            return self.function(handle.local, *args, **kwargs)
        with computing_in_float8(handle.local, handle._float8):
            return getattr(handle.local, self.name)(*args, **kwargs)


def member_of(value: Any) -> Member | None:
    handle = value.handle if isinstance(value, ActorMethod) else value
    return handle._member if isinstance(handle, ActorHandle) else None


def library_method(handle: ActorHandle, function: Callable[..., Any]) -> ActorMethod:
    """A function of cg as a method of an actor; it takes the instance as its first argument."""
    key = f"cg.{function.__name__}"  # no attribute of a class has such a name
    method = handle._methods.get(key)
    if method is None:
        method = handle._methods[key] = ActorMethod(handle, function.__name__, function=function)
    return method


def remat(method: ActorMethod | ActorHandle) -> ActorMethod:
    """The same method, for which a step saves only the inputs for the backward.

    `cg.remat(stage.forward)(x)` gives the values and gradients of `stage.forward(x)`, bit for bit.
    The backward computes the forward again, so less memory is used between the two. Masks of
    dropout and all else that the forward draws are saved as well.

    Args:
        method: a method of an actor, or an actor that can be called itself. The trace of the step
            refuses a method that changes its actor's state.

    Returns:
        The method, to be called in its place.

    Raises:
        TypeError: `method` is something else.
    """
    if isinstance(method, ActorHandle) and _is_method(method.cls, "__call__"):
        method = method.__getattr__("__call__")
    if not isinstance(method, ActorMethod):
        raise TypeError(
            "cg.remat takes a method of an actor, as in cg.remat(stage.forward)(x), not "
            f"{method!r}; inside of a method, use torch.utils.checkpoint"
        )
    return method.rematerialized


def _is_method(cls: type[Any], name: str) -> bool:
    # getattr_static would also find methods of the metaclass.
    attribute = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if isinstance(attribute, staticmethod | classmethod):
        return True
    return callable(attribute) and not isinstance(attribute, type)


def _methods_of(cls: type[Any]) -> list[str]:
    """The public methods that the user wrote, in alphabetical order."""
    names = {
        name
        for base in cls.__mro__
        if base not in (object, torch.nn.Module)
        for name in vars(base)
        if not name.startswith("_") and _is_method(cls, name)
    }
    return sorted(names)


def _call(
    session: Session, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call of an actor's method; return the results that the step's Python gets."""
    loc = caller_location(3)
    handle = method.handle
    if handle.name in session.remat and method.function is None:
        method = method.rematerialized
    if handle._peers is not session.peers:
        raise TraceError(
            f"{handle.name} was made in another world than the one that traces this step",
            loc=loc,
            remedy="make the actor again, after the world has been set up",
        )
    session.ambient.check(method.shown, loc)
    with torch._C.DisableTorchFunction():
        arguments = take_apart(session, args, kwargs, method.shown, loc)
    group = None
    if handle._group is None and session.module.meshes:
        with torch._C.DisableTorchFunction():
            arguments = gather(session, handle.place, arguments, loc)
    elif handle._group is not None:
        with torch._C.DisableTorchFunction():
            named = _named(method)
            arguments, layouts = bring(session, handle._group, named, arguments, loc)
        group = handle._group.group(layouts)
    called = (method, None if group is None else group.inputs)
    callee = find_or_declare(
        session, called, arguments, lambda: _subject(session, method, group), loc
    )
    if callee.declaration.kind is FunctionKind.OPAQUE:
        reduce_gradients(session, handle.name, loc)
    return record(session, callee, arguments, handle.place, loc)


def _named(method: ActorMethod) -> tuple[str, Callable[..., Any]]:
    """The name that plans use for a method, and the method's function."""
    if method.function is not None:
        return method.name, method.function
    cls = method.handle.cls
    if method.name == "__call__" and issubclass(cls, torch.nn.Module):
        return "forward", cls.forward
    return method.name, getattr(cls, method.name)


def _subject(
    session: Session, method: ActorMethod, group: Group | None
) -> tuple[MethodTarget | None, tuple[int, ...], str]:
    """The subject for `find_or_declare`: the method to trace, its owners and its name."""
    handle = method.handle
    owner = handle.place.ranks
    if session.sharing is None:
        with torch._C.DisableTorchFunction():
            session.sharing = find_sharing(handle._actors, session.peers)
    if not handle.is_local:
        return None, owner, method.shown
    target = MethodTarget(
        handle.name,
        handle._instance,
        method.name,
        method.remat,
        method.function,
        session.sharing.together.get(handle.name, ()),
        session.sharing.uses.get(handle.name),
        group,
        handle._float8,
        handle._resting if method.function is None else {},  # functions of cg look at gradients
    )
    return target, owner, method.shown
