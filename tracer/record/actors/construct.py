"""Make an actor on a mesh: each rank constructs the same object, and keeps its pieces."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ....ir.text.differences import disagreement
from ....ir.types import Mesh
from ...function.groups.meta import Init, TensorSource, fill, fill_from
from ...function.groups.pieces_only import refuse_optimizers
from ...values.actor_state import collect
from ...values.group import GroupActor
from ...values.heap.gradient_hooks import copy_hooks
from ...values.interface import Peers
from ...values.optimizer_state import move, settings_of
from ...values.pieces import LogicalTensor, keep_pieces, lay_out
from ...values.plan import Sharding, ShardingPlan
from .actors import ActorError, ReplicaMemo


@dataclass(frozen=True)
class Constructor:
    """Makes one actor on a mesh.

    Attributes:
        name: the actor's name.
        cls: the actor's class.
        mesh, plan, store, init, bucket_bytes: the arguments of `Cls.on`.
        peers: the world.
        check: refuses an instance that cannot be on a mesh.
        rests: whether parameters rest on the host.
    """

    name: str
    cls: type[Any]
    mesh: Mesh
    plan: ShardingPlan
    store: Sharding
    init: Init
    bucket_bytes: int
    peers: Peers
    check: Callable[[Any], None]
    rests: bool

    def make(self, construct: Callable[[], Any], device: torch.device | None) -> GroupActor:
        """Construct the actor in each process that plays a rank of the mesh. Collective.

        Args:
            construct: calls the class with the user's arguments.
            device: the device of the instances; None for the host.

        Returns:
            The actor; without instances in a process that plays no rank of the mesh.

        Raises:
            ActorError: another rank could not construct it, or has constructed another object.
            Exception: whatever the constructor raised on this rank.
        """
        played = [rank for rank in self.mesh.ranks if self.peers.plays(rank)]
        first = self.mesh.ranks[0]
        state = torch.get_rng_state() if first in played else None
        state = self.peers.broadcast(state, first)
        failed: Exception | None = None
        actor: GroupActor | None = None
        content = ""
        try:
            if played:
                with _drawing_from(state, first in played), self._device():
                    instance = construct()
                logical = self._lay_out(instance)
                if len(played) < len(self.mesh.ranks):
                    content = _content(instance, logical)
                instances = self._pieces(instance, logical, played, device, state)
                by_path = {tensor.path: tensor for tensor in logical}
                actor = self._actor(by_path, instances, device)
        except Exception as error:
            failed = error
        self._compare(failed, content, played)
        return actor if actor is not None else self._actor({}, {}, device)

    def _device(self) -> AbstractContextManager[Any]:
        return torch.device("meta") if self.init == "meta" else nullcontext()

    def _actor(
        self,
        logical: dict[str, LogicalTensor],
        instances: dict[int, Any],
        device: torch.device | None,
    ) -> GroupActor:
        return GroupActor(
            *(self.name, self.mesh, self.plan, logical, instances, self.bucket_bytes),
            device=device,
        )

    def _lay_out(self, instance: Any) -> tuple[LogicalTensor, ...]:
        self.check(instance)
        tensors = collect(instance).tensors
        for state in tensors:
            # A copy of one copies its mode, and with it what frees the memory of other tensors.
            if isinstance(state.tensor, FakeTensor):
                raise ActorError(
                    f"{self.name}: '{state.slots[0].path}' is a fake tensor, which has no numbers "
                    "for the ranks; let the constructor keep a real tensor there"
                )
        paths = [slot.path for state in tensors for slot in state.slots]
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
        """The instances of the played ranks, by rank, each with the rank's pieces."""
        copies = [instance, *(_copied(instance) for _ in played[1:])]
        for rank, replica in zip(played, copies, strict=True):
            by_path = {tensor.path: tensor for tensor in logical}
            if self.init == "meta":
                with _drawing_from(state, is_own=False):
                    fill(replica, by_path, self.mesh, rank, self.name)
            else:
                keep_pieces(replica, logical, self.mesh, rank)
            if isinstance(self.init, TensorSource):
                fill_from(self.init, replica, by_path, self.mesh.position(rank), self.name)
            if device is not None:
                move(replica, device, self.rests)
        return dict(zip(played, copies, strict=True))

    def _compare(self, failed: Exception | None, content: str, played: Sequence[int]) -> None:
        words = None if failed is None else f"{type(failed).__name__}: {failed}"
        digest = hashlib.sha256(content.encode()).hexdigest() if content else ""
        reports = self.peers.allgather((words, digest, tuple(played)))
        if failed is not None:
            raise failed
        for error, _, ranks in reports:
            if error is not None:
                raise ActorError(f"{self.name} could not be made on rank {ranks[0]}: {error}")
        digests = {
            rank_digest: ranks[0] for _, rank_digest, ranks in reversed(reports) if rank_digest
        }
        if len(digests) > 1:
            one, other = sorted(digests.values())[:2]
            contents = self.peers.allgather(content or None)
            raise ActorError(
                f"ranks {one} and {other} have made {self.name} with other numbers; torch's "
                "generator starts the constructor equally on all ranks of the mesh: draw from it, "
                "or seed what else is drawn from (random, numpy), read the same files, and give "
                "optimizers the same settings. By digests of its tensors, and by settings, "
                f"{disagreement(contents).rstrip()}"
            )


def _copied(instance: Any) -> Any:
    """A deep copy with gradients, their hooks and all attributes of optimizers, which torch omits.

    Functions are left out, such as the `step` that a scheduler puts into its optimizer: they are
    bound to the original.
    """
    memo = ReplicaMemo()
    copied = copy.deepcopy(instance, memo)
    pairs = zip(collect(instance).tensors, collect(copied).tensors, strict=True)
    for original, duplicate in pairs:
        if original.tensor.grad is not None:
            duplicate.tensor.grad = original.tensor.grad.clone()
        copy_hooks(original.tensor, duplicate.tensor, memo)
    for trainer in collect(instance).trainers:
        twin = memo.get(id(trainer), trainer)
        for name, value in vars(trainer).items():
            if name not in vars(twin) and not callable(value):
                setattr(twin, name, copy.deepcopy(value, memo))
    return copied


def arguments_of(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """The pairs of a method of a class and one of its arguments, by name."""
    for name in dir(cls):
        function = getattr(cls, name)
        if name.startswith("__") or not inspect.isfunction(function):
            continue
        for argument in list(inspect.signature(function).parameters)[1:]:
            yield name, argument


@contextmanager
def _drawing_from(state: torch.Tensor, is_own: bool) -> Iterator[None]:
    """Let torch's generator start at a state inside the `with` block.

    Args:
        state: the state of the generator of the mesh's first rank.
        is_own: whether this process's generator is in that state. It then advances; otherwise the
            generator is restored after the block.
    """
    if is_own:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def _content(instance: Any, logical: tuple[LogicalTensor, ...]) -> str:
    """Tensors of an instance by their digests, layouts, and settings of optimizers, in lines."""
    actor_state = collect(instance)
    lines = [*map(settings_of, actor_state.trainers)]
    for state in actor_state.tensors:
        tensor = state.tensor.detach()
        line = f"{state.slots[0].path}: {tensor.dtype} {tuple(tensor.shape)}"
        if tensor.device.type != "meta":
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
            line += f" {hashlib.sha256(flat.numpy().data).hexdigest()[:32]}"
        lines.append(line)
    return "\n".join([*lines, *map(repr, logical)])
