"""Make an actor on a mesh: each rank constructs it from the same numbers, and keeps pieces."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.types import Mesh
from ..actors.actor_state import collect
from ..actors.actors import ActorError
from ..actors.optimizer_state import move
from ..functions.interface import Peers
from .group import GroupActor
from .meta import Init, TensorSource, fill, fill_from
from .pieces import LogicalTensor, keep_pieces, lay_out
from .pieces_only import refuse_optimizers
from .plan import Plan, Sharding


@dataclass(frozen=True)
class Constructor:
    """Makes one actor on a mesh.

    Attributes:
        name: of the actor.
        cls: its class.
        mesh, plan, store, init, bucket_bytes: as `Cls.on` takes them.
        peers: the world.
        check: refuses an instance that cannot be on a mesh.
    """

    name: str
    cls: type[Any]
    mesh: Mesh
    plan: Plan
    store: Sharding
    init: Init
    bucket_bytes: int
    peers: Peers
    check: Callable[[Any], None]

    def make(self, construct: Callable[[], Any], device: torch.device | None) -> GroupActor:
        """Construct it where a rank of the mesh is played. Collective.

        Raises:
            ActorError: another rank could not make it, or has made another object.
        """
        played = [rank for rank in self.mesh.ranks if self.peers.plays(rank)]
        first = self.mesh.ranks[0]
        state = torch.get_rng_state() if first in played else None
        state = self.peers.broadcast(state, first)
        failed: Exception | None = None
        made: GroupActor | None = None
        digest = ""
        try:
            if played:
                with _drawing_from(state, first in played), self._device():
                    instance = construct()
                logical = self._lay_out(instance)
                digest = _digest(instance, logical) if len(played) < len(self.mesh.ranks) else ""
                instances = self._pieces(instance, logical, played, device, state)
                made = self._actor({tensor.path: tensor for tensor in logical}, instances)
        except Exception as error:
            failed = error
        self._compare(failed, digest, played)
        return made if made is not None else self._actor({}, {})

    def _device(self) -> AbstractContextManager[Any]:
        return torch.device("meta") if self.init == "meta" else nullcontext()

    def _actor(self, logical: dict[str, LogicalTensor], instances: dict[int, Any]) -> GroupActor:
        return GroupActor(self.name, self.mesh, self.plan, logical, instances, self.bucket_bytes)

    def _lay_out(self, instance: Any) -> tuple[LogicalTensor, ...]:
        self.check(instance)
        paths = [slot.path for each in collect(instance).tensors for slot in each.slots]
        self.plan.check(self.cls, paths, arguments_of(self.cls))
        logical = lay_out(instance, self.plan, self.store, self.mesh)
        if any(tensor.layout is not None for tensor in logical):
            refuse_optimizers(collect(instance).trainers, self.name)
        return logical

    def _pieces(
        self,
        instance: Any,
        logical: tuple[LogicalTensor, ...],
        played: Sequence[int],
        device: torch.device | None,
        state: torch.Tensor,
    ) -> dict[int, Any]:
        """The instance of each played rank; where these are several, each has its own."""
        copies = [instance, *(_copied(instance) for _ in played[1:])]
        for rank, each in zip(played, copies, strict=True):
            by_path = {tensor.path: tensor for tensor in logical}
            if self.init == "meta":
                with _drawing_from(state, is_own=False):
                    fill(each, by_path, self.mesh, rank, self.name)
            else:
                keep_pieces(each, logical, self.mesh, rank)
            if isinstance(self.init, TensorSource):
                fill_from(self.init, each, by_path, self.mesh.position(rank), self.name)
            if device is not None:
                move(each, device)
        return dict(zip(played, copies, strict=True))

    def _compare(self, failed: Exception | None, digest: str, played: Sequence[int]) -> None:
        words = None if failed is None else f"{type(failed).__name__}: {failed}"
        told = self.peers.allgather((words, digest, tuple(played)))
        if failed is not None:
            raise failed
        for error, _, ranks in told:
            if error is not None:
                raise ActorError(f"{self.name} could not be made on rank {ranks[0]}: {error}")
        digests = {theirs: ranks[0] for _, theirs, ranks in reversed(told) if theirs}
        if len(digests) > 1:
            one, other = sorted(digests.values())[:2]
            raise ActorError(
                f"ranks {one} and {other} have made {self.name} with other numbers; torch's "
                "generator starts the constructor equally on all ranks of the mesh: draw from it, "
                "or seed what else is drawn from (random, numpy), and read the same files"
            )


def _copied(instance: Any) -> Any:
    """A copy with gradients and all attributes of optimizers, which torch leaves out.

    Functions stay out, such as the `step` that a scheduler has put into its optimizer: they belong
    to what they were made for.
    """
    memo: dict[int, Any] = {}
    made = copy.deepcopy(instance, memo)
    for one, two in zip(collect(instance).tensors, collect(made).tensors, strict=True):
        if one.tensor.grad is not None:
            two.tensor.grad = one.tensor.grad.clone()
    for trainer in collect(instance).trainers:
        twin = memo.get(id(trainer), trainer)
        for name, value in vars(trainer).items():
            if name not in vars(twin) and not callable(value):
                setattr(twin, name, copy.deepcopy(value, memo))
    return made


def arguments_of(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """The methods of a class, each with each of its arguments."""
    for name in dir(cls):
        function = getattr(cls, name)
        if name.startswith("__") or not inspect.isfunction(function):
            continue
        for argument in list(inspect.signature(function).parameters)[1:]:
            yield name, argument


@contextmanager
def _drawing_from(state: torch.Tensor, is_own: bool) -> Iterator[None]:
    """Inside the `with` block torch's generator starts at a state; other ranks' stay behind it."""
    if is_own:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def _digest(instance: Any, logical: tuple[LogicalTensor, ...]) -> str:
    """A hash of all tensors of an instance, and of their layouts."""
    found = hashlib.sha256(repr(logical).encode())
    for each in collect(instance).tensors:
        tensor = each.tensor.detach()
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta":
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
            found.update(flat.numpy().data)
    return found.hexdigest()
