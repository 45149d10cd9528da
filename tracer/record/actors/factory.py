"""Make actors: the decorator `@cg.actor`, and the placement of actors on ranks and meshes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch

from ....ir.types import Mesh
from ...errors import note_refusal
from ...function.groups.meta import Init, TensorSource, fill_from
from ...source import caller_location
from ...values.actor_state import collect, reach
from ...values.float8_layers import Float8Layers, check_named, unsupported
from ...values.gradient_buckets import BUCKET
from ...values.heap.kinds import TRAINERS
from ...values.heap.pinned_piece import PinnedMemory
from ...values.heap.variables import variables_of
from ...values.holdings import Actors
from ...values.interface import Peers
from ...values.mesh import describe
from ...values.optimizer_state import RestingState, move
from ...values.plan import Sharding, ShardingPlan, whole
from ...values.sharing import plays_all
from ..session.session import current
from .actors import ELSEWHERE, RESERVED, ActorError, ActorHandle, member_of
from .construct import Constructor

T = TypeVar("T")

MANY = 1000
"""The longest container that is searched for parts of a model; longer ones hold data."""

HOST: Final = "host"
"""The value of `store` that lets parameters and the state of optimizers rest on the host."""

HOST_STATE: Final = "host-state"
"""The value of `store` that lets the state of optimizers alone rest on the host."""

OnHost: TypeAlias = Literal["host", "host-state"]

Store: TypeAlias = Sharding | OnHost | tuple[Sharding, OnHost]
"""Where tensors of an actor are while they are not in use."""

Make: TypeAlias = Callable[..., ActorHandle]
"""Takes the arguments of an actor's constructor."""


def _unpinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class ActorFactory:
    """The decorator `@cg.actor`, for the world of one program.

    The decorator adds one attribute to a class, `on`, and changes nothing else.
    `Cls.on(rank)(*args, **kwargs)` makes an instance on `rank` and returns a handle, on all ranks.
    `Cls(*args)` still makes a plain object. Subclasses of an actor class are actor classes.

    Args:
        world: gives the world; called only when an actor is made.
        device: gives the device of this process's rank, None for the host; called at the same time.
        pinned: takes memory of the host that this device can copy to and from.
    """

    def __init__(
        self,
        world: Callable[[], Peers],
        device: Callable[[], torch.device | None] = lambda: None,
        pinned: PinnedMemory = _unpinned,
    ) -> None:
        self._world = world
        self._pinned = pinned
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

    def place(
        self,
        cls: type[Any],
        where: int | Mesh,
        *,
        plan: ShardingPlan | Mapping[str, Sharding] | None = None,
        store: Store = whole,
        init: Init = "whole",
        bucket_bytes: int = BUCKET,
    ) -> Make:
        """Choose the rank or the mesh of an actor of class `cls`.

        An actor on a mesh is one object: the constructor runs on each rank of the mesh, with the
        same random numbers, and each rank keeps its pieces of the tensors. All ranks of the world
        make the actor together.

        Args:
            cls: the actor's class.
            where: a rank, or a mesh.
            plan: on a mesh, the layouts of tensors and arguments; the plan leaves all others whole.
                On a mesh or a rank, the layers that compute in float8, by `cg.float8`.
            store: on a mesh, further cuts of the trained tensors while they are not in use. An axis
                along which the plan cuts a tensor already cuts it no further. "host", on a mesh or
                a rank: contiguous parameters, and what the actor's optimizers keep for parameters,
                element by element, rest in pinned memory of the host. A traced method gets copies
                of the parameters on the device, layer by layer. While an opaque method of the actor
                runs, trained parameters and the state are on the device; frozen ones are not. A
                rank without a device has all on the host anyway. "host-state": as "host", but for
                what optimizers keep alone. A pair, as in `(cg.cut(0, "dp"), "host")`, says both.
            init: the origin of the tensors. "whole": the constructor makes them. "meta", on a
                mesh: the constructor runs on the meta device, and each module is filled by its
                `reset_parameters()`. A source, such as `cg.pretrained(folder)`: it fills the
                tensors that the constructor has left on the meta device. With "meta" or a source,
                no rank ever holds the whole object.
            bucket_bytes: on a mesh, the most bytes of gradients that a rank reduces together; a
                larger gradient is reduced alone. Backwards are cut at the ends of buckets, so that
                a bucket is reduced while the rest of a backward runs.

        Returns:
            A function that takes the arguments of the constructor, makes the actor, and returns
            its handle.

        Raises:
            ActorError: the world has no such rank, a step is being traced, or a method of `cls`
                has a name that handles use themselves; or a plan with `cg.float8` is given for
                parameters that rest on the host.
            ValueError: `bucket_bytes` is less than 1. The function that is returned raises it if
                the plan does not fit the class or the mesh, or a source lacks a tensor.
        """
        peers = self._world()
        sharding, on_host = _taken_apart(store)
        shown = f"{cls.__name__}.on({where!r})"
        if isinstance(where, Mesh):
            shown = f"{cls.__name__}.on({describe(where)})"
        if current() is not None:
            error = ActorError(f"{shown} inside a step; make actors before the step is traced")
            note_refusal(error)
            raise error
        if isinstance(where, Mesh):
            ranks = where.ranks
        else:
            ranks = (where,) if type(where) is int else ()
        if not ranks or not all(0 <= rank < peers.size for rank in ranks):
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

        if on_host == HOST and isinstance(plan, ShardingPlan) and plan.float8:
            raise ActorError(
                f'{shown}: store="host" lets parameters rest on the host, and cg.float8 casts '
                'weights where they rest, on the device; give store="host-state" for what '
                "optimizers keep alone, or leave cg.float8 out of the plan"
            )
        if isinstance(where, Mesh):
            if bucket_bytes < 1:
                raise ValueError(f"{shown}: bucket_bytes is at least 1, not {bucket_bytes}")
            mesh = where
            chosen = plan if isinstance(plan, ShardingPlan) else ShardingPlan.of(plan or {})
            return lambda *a, **k: self._make_group(
                cls, mesh, chosen, sharding, init, bucket_bytes, on_host, peers, a, k
            )
        own = ShardingPlan() if plan is None else plan
        cuts = not isinstance(own, ShardingPlan) or bool(own.items)
        if cuts or sharding != whole or init == "meta":
            raise ActorError(
                f"{shown}: a plan is of an actor on a mesh, as cg.mesh(dp=2) makes it; that of one "
                'rank names layers by cg.float8, and cuts nothing; store is "host" there, or '
                '"host-state"'
            )
        layers = own.float8 if isinstance(own, ShardingPlan) else ()
        return lambda *a, **k: self._make(cls, ranks[0], layers, init, on_host, peers, a, k)

    def _make(
        self,
        cls: type[Any],
        rank: int,
        layers: tuple[Float8Layers, ...],
        init: Init,
        on_host: OnHost | None,
        peers: Peers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ActorHandle:
        """Make the instance in the process that plays the rank, and a handle in every process.

        An error of the constructor is raised on the actor's rank only.
        """
        name = self.new_name(cls)
        instance: Any = ELSEWHERE
        if peers.plays(rank):
            instance = self._instance(cls, init, name, on_host, args, kwargs)
            self._check_float8(name, layers, instance)
        if instance is not ELSEWHERE:
            self._refuse_shared(name, instance, peers)
        held = {} if instance is ELSEWHERE else {rank: instance}
        resting = self._resting(name, held, on_host, {})
        handle = ActorHandle(
            name, rank, cls, peers, instance, self.actors, float8=layers, resting=resting
        )
        return self._entered(handle, peers, (args, kwargs))

    def _make_group(
        self,
        cls: type[Any],
        mesh: Mesh,
        plan: ShardingPlan,
        store: Sharding,
        init: Init,
        bucket_bytes: int,
        on_host: OnHost | None,
        peers: Peers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ActorHandle:
        """Make an actor on a mesh; collective."""
        name = self.new_name(cls)

        def check(instance: Any) -> None:
            self._refuse_shared(name, instance, peers, is_group=True)
            self._check_float8(name, layers, instance)

        layers = plan.float8
        constructor = Constructor(
            name, cls, mesh, plan, store, init, bucket_bytes, peers, check, on_host == HOST
        )
        group = constructor.make(lambda: cls(*args, **kwargs), self.device())
        instance = group.instances[group.first] if group.instances else ELSEWHERE
        resting = self._resting(name, group.instances, on_host, group.largest)
        handle = ActorHandle(
            name, mesh.ranks[0], cls, peers, instance, self.actors, group, layers, resting
        )
        return self._entered(handle, peers, (args, kwargs))

    def _resting(
        self,
        name: str,
        instances: Mapping[int, Any],
        on_host: OnHost | None,
        largest: Mapping[str, int],
    ) -> dict[int, RestingState]:
        """State on the host, by rank; empty where the host has the tensors anyway."""
        device = self.device()
        if device is None or on_host is None:
            return {}
        return {
            rank: RestingState(name, held, self._pinned, device, on_host == HOST, largest)
            for rank, held in instances.items()
        }

    def _check_float8(self, name: str, layers: tuple[Float8Layers, ...], instance: Any) -> None:
        """Refuse layers that an instance lacks, or that its device does not compute in float8.

        Raises:
            ValueError: a pattern names no module with a matrix.
            ActorError: the device has no such products.
        """
        if not layers:
            return
        check_named(layers, type(instance), collect(instance).tensors)
        device = self.device()
        if device is None or device.type != "cuda":
            return
        lack = unsupported(layers, torch.cuda.get_device_capability(device))
        if lack is not None:
            raise ActorError(
                f"{name}: cg.float8: {lack}; leave cg.float8 out of the plan, or take another GPU"
            )

    def _refuse_shared(
        self, name: str, instance: Any, peers: Peers, is_group: bool = False
    ) -> None:
        """Refuse an actor on a mesh that shares a tensor with another actor, since it is cut."""
        others = [m for m in self.actors.local(peers) if is_group or m.group is not None]
        if not others:
            return
        path_of = {id(state.tensor): state.path for state in collect(instance).tensors}
        for member in others:
            for state in reach(member.held).tensors:
                if id(state.tensor) in path_of:
                    raise ActorError(
                        f"{name} and {member.name} hold one tensor, '{path_of[id(state.tensor)]}', "
                        "and an actor on a mesh cuts its tensors; make one actor of the two, or "
                        "give each its own by copy.deepcopy"
                    )

    def _entered(self, handle: ActorHandle, peers: Peers, arguments: Any) -> ActorHandle:
        """The handle; notes the line that made the actor, and the arguments of its constructor."""
        member = handle._member
        member.made_at = caller_location(2)
        if not plays_all(peers):
            self.actors.note_given(member, (arguments, _read_by_constructor(handle.cls)))
        return handle

    def _instance(
        self,
        cls: type[Any],
        init: Init,
        name: str,
        on_host: OnHost | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make the instance, with its tensors on the device of its rank, but for what rests."""
        device = self.device()
        # The constructor runs on the host, so that it draws the same numbers for every device.
        instance = cls(*args, **kwargs)
        if isinstance(init, TensorSource):
            fill_from(init, instance, {}, None, name)
        if device is not None:
            move(instance, device, on_host == HOST)
        return instance

    def new_name(self, cls: type[Any]) -> str:
        """The name of the next actor of a class, such as `stage0`; the same on all ranks."""
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

    def __get__(self, instance: object, owner: type[Any]) -> Callable[..., Make]:
        return functools.partial(self._factory.place, owner)


def _taken_apart(store: object) -> tuple[Sharding, OnHost | None]:
    """The cuts that `store` names, and what rests on the host, if anything does."""
    parts = store if isinstance(store, tuple) else (store,)
    shardings = [part for part in parts if isinstance(part, Sharding)]
    on_host: list[OnHost] = [name for name in _ON_HOST if name in parts]
    count = len(shardings) + len(on_host)
    if max(len(shardings), len(on_host)) > 1 or count != len(parts) or not parts:
        raise TypeError(
            f"store={store!r}: it is a sharding, as cg.cut(0, 'dp') makes one, \"host\", "
            '"host-state", or a pair of a sharding and one of these'
        )
    return (shardings[0] if shardings else whole), (on_host[0] if on_host else None)


_ON_HOST: tuple[OnHost, ...] = (HOST, HOST_STATE)


def _read_by_constructor(cls: type[Any]) -> dict[str, Any]:
    """The modules, tensors and optimizers that a class's constructors read from variables."""
    values = {
        f"{base.__qualname__}.{variable.path}": variable.value()
        for base in cls.__mro__
        if "__init__" in vars(base)
        for variable in variables_of(vars(base)["__init__"])
    }
    return {name: value for name, value in values.items() if _is_of_a_model(value)}


def _is_of_a_model(value: Any) -> bool:
    """True for a module, a tensor or an optimizer, and for a list, tuple or dict with one.

    Containers of more than `MANY` items hold data, and are not searched.
    """
    kinds = (torch.nn.Module, torch.Tensor, *TRAINERS)
    if not isinstance(value, (list, tuple, dict)):
        return isinstance(value, kinds)
    items = value.values() if isinstance(value, dict) else value
    return len(value) <= MANY and any(isinstance(item, kinds) for item in items)
