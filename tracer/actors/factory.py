"""Make actors: the decorator `@cg.actor`, and the placement of an instance on a rank."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from ..errors import note_refusal
from ..functions.interface import Peers
from ..source import caller_location
from ..step.session import is_tracing
from .actor_state import collect
from .actors import ELSEWHERE, RESERVED, ActorError, ActorHandle, member_of
from .holdings import Actors
from .sharing import plays_all

T = TypeVar("T")

Make: TypeAlias = Callable[..., ActorHandle]
"""Takes the arguments of an actor's constructor."""


class ActorFactory:
    """The decorator `@cg.actor`, for one program's world.

    Decorating leaves a class as it is but for a new attribute: `Cls.on(rank)(*args, **kwargs)`
    makes an instance on `rank` and returns a handle, on all ranks. `Cls(*args)` still makes a
    plain object. Subclasses of an actor class are actor classes.

    Args:
        world: gives the world; asked when an actor is made, not before.
        device: gives the device of this process's rank, None for the host; likewise.
    """

    def __init__(
        self,
        world: Callable[[], Peers],
        device: Callable[[], torch.device | None] = lambda: None,
    ) -> None:
        self._world = world
        self.device = device
        self.actors = Actors(member_of)
        self._counts: dict[str, int] = {}
        self._used: set[str] = set()

    def __call__(self, cls: type[T]) -> type[T]:
        """Make `cls` an actor class.

        Raises:
            TypeError: `cls` is not a class, or has an attribute `on` of its own.
        """
        if not isinstance(cls, type):
            raise TypeError(f"cg.actor decorates classes, not {cls!r}")
        own = inspect.getattr_static(cls, "on", None)
        if own is not None and not isinstance(own, _On):
            raise TypeError(
                f"class {cls.__name__} has an attribute 'on', which cg.actor would replace; "
                "rename it"
            )
        setattr(cls, "on", _On(self))  # noqa: B010 - not an attribute that type checkers know
        return cls

    def place(self, cls: type[Any], rank: int) -> Make:
        """Choose the rank of an actor of class `cls`; call the result to make it.

        Raises:
            ActorError: the world has no such rank, a step is being traced, or a method of `cls`
                has a name that handles use themselves.
        """
        peers = self._world()
        shown = f"{cls.__name__}.on({rank!r})"
        if is_tracing():
            error = ActorError(f"{shown} inside a step; make actors before the step is traced")
            note_refusal(error)
            raise error
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < peers.size:
            raise ActorError(
                f"{shown}: the world has ranks 0..{peers.size - 1}; start more of them (mpirun -n, "
                "or CG_RANKS without MPI), or place the actor on an existing one, as in "
                f"{cls.__name__}.on(i % cg.world_size())"
            )
        for name in sorted(RESERVED):
            if callable(getattr(cls, name, None)):
                raise ActorError(
                    f"{shown}: method '{name}' of {cls.__name__} would be hidden by the handle's "
                    "own attribute; rename the method"
                )

        def make(*args: Any, **kwargs: Any) -> ActorHandle:
            return self._make(cls, rank, peers, args, kwargs)

        return make

    def _make(
        self, cls: type[Any], rank: int, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorHandle:
        """Make the instance, where its rank is played, and a handle everywhere.

        What the constructor raises is raised on its rank alone.
        """
        name = self.new_name(cls)
        instance = self._instance(cls, args, kwargs) if peers.plays(rank) else ELSEWHERE
        handle = ActorHandle(name, rank, cls, peers, instance, self.actors)
        member = handle._member
        member.made = caller_location()
        if not plays_all(peers):
            self.actors.note_given(member, (args, kwargs))
        return handle

    def _instance(self, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The instance; what it holds is on its rank's device."""
        device = self.device()
        # Made on the host first, so that it starts from the same numbers as anywhere else.
        instance = cls(*args, **kwargs)
        if device is not None:
            for held in collect(instance).tensors:
                # In place: an optimizer, say, knows the parameter by its identity.
                held.tensor.data = held.tensor.data.to(device)
        return instance

    def new_name(self, cls: type[Any]) -> str:
        """The name of the next actor of a class: `stage0`, `stage1`; the same on all ranks."""
        base = re.sub(r"\W", "_", cls.__name__.lower(), flags=re.ASCII)
        while True:
            number = self._counts.get(base, 0)
            self._counts[base] = number + 1
            name = f"{base}{number}"
            if name not in self._used:
                self._used.add(name)
                return name


class _On:
    """The attribute `on` of an actor class."""

    def __init__(self, factory: ActorFactory) -> None:
        self._factory = factory

    def __get__(self, instance: object, owner: type[Any]) -> Callable[[int], Make]:
        return functools.partial(self._factory.place, owner)
