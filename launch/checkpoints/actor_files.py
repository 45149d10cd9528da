"""Save and load the tensors of actors: one safetensors file, whatever ranks hold them.

A file holds logical tensors by name. Each rank writes the pieces that it holds, and reads those
that it needs. So other meshes can go on from it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...ir.layout import Region
from ...tracer.record.actors.actors import ActorHandle
from ...tracer.values.actor_state import StateTensor, collect
from ...tracer.values.optimizer_state import optimizers_of
from ..world.world import world
from .held import (
    NameOf,
    SavedPiece,
    group_with,
    has_optimizers,
    optimizer_pieces,
    pieces,
    region_like,
)
from .tensor_files import PREFIXES, TensorFile, replace, table_of, write
from .together import on_rank_0, together


def save(
    file: str | os.PathLike[str], actors: Mapping[str, ActorHandle], *, dry_run: bool = False
) -> None:
    """Write the tensors of actors, and of their optimizers, as one safetensors file; collective.

    The file appears when it is complete. All ranks see one file system.

    Args:
        file: its name.
        actors: by the prefix of their tensors' names: the tensor `up.weight` of the actor `"0."` is
            `0.up.weight`, and of its optimizer's state `optimizer.0.up.weight.exp_avg`.
        dry_run: write nothing, but refuse all that would be refused, before the first step. What
            optimizers make in their first update is not there yet.

    Raises:
        ValueError: two tensors have one name, or one has an element type without a name there. Or
            an optimizer keeps a tensor that cannot be cut as its parameter is, or state that is no
            tensor or belongs to no parameter.
        OSError: a rank could not write.
    """
    path = Path(file)
    partial = path.with_name(f".{path.name}.partial")
    own_pieces = together(lambda: _pieces(actors), "name its tensors")
    table = table_of(own_pieces)
    if dry_run:
        return
    write(partial, table, own_pieces, {PREFIXES: json.dumps(sorted(actors))})
    on_rank_0(lambda: replace(partial, path))


def load(file: str | os.PathLike[str], actors: Mapping[str, ActorHandle]) -> None:
    """Fill the tensors of actors, and their optimizers, from a file of `save`; collective.

    The ranks, meshes and plans may be others than those that have written it. State that
    an optimizer keeps for a parameter is made as the file has it, in its shape and element type.

    The file may have more actors than are loaded, and an actor without optimizers takes its own
    tensors alone.

    Args:
        file, actors: as for `save`.

    Raises:
        KeyError: the file lacks a tensor that an actor has.
        ValueError: a tensor has another shape or element type in the file, or the file is damaged,
            such as where the keys of optimizers differ between parameters. Or the file has a tensor
            of an actor that neither it nor its optimizers take, such as one that the actor makes in
            its first update. Nothing has been filled.
    """
    opened = together(lambda: TensorFile(Path(file)), "read the file")
    names = together(lambda: _check(opened, actors), "read the file")
    _refuse_surplus(opened, actors, names)
    for prefix, actor in actors.items():
        fill_state(opened, actor, _named(prefix))
        fill_optimizers(opened, actor, _named(f"optimizer.{prefix}"))


def _check(opened: TensorFile, actors: Mapping[str, ActorHandle]) -> set[str]:
    """Check all that actors take of a file; returns the names that this process's ranks take."""
    names: set[str] = set()
    for prefix, actor in actors.items():
        names |= check_state(opened, actor, _named(prefix))
        names |= check_optimizers(opened, actor, _named(f"optimizer.{prefix}"))
    return names


def _refuse_surplus(
    opened: TensorFile, actors: Mapping[str, ActorHandle], own_names: set[str]
) -> None:
    """Refuse tensors of a file that belong to an actor, and that nothing takes. Collective.

    Args:
        own_names: the names that the ranks of this process take.
    """
    training = {prefix for prefix, actor in actors.items() if has_optimizers(actor)}
    gathered = world().allgather((own_names, training))
    taken = {name for names, _ in gathered for name in names}
    trained = {prefix for _, prefixes in gathered for prefix in prefixes}
    other_prefixes = [p for p in opened.prefixes if not any(name.startswith(p) for name in taken)]
    for name in sorted(opened.shapes.keys() - taken):
        inner = name.removeprefix("optimizer.")
        parameter = inner.rpartition(".")[0]
        is_kept = inner != name and parameter in opened.shapes
        tensor_name = inner if is_kept else name
        owner = max(
            (p for p in (*actors, *other_prefixes) if tensor_name.startswith(p)),
            key=len,
            default=None,
        )
        if owner is None or owner not in actors or (is_kept and owner not in trained):
            continue
        if is_kept:
            raise ValueError(
                f"{opened.path} has '{name}', and no optimizer of {actors[owner].name} trains "
                f"'{parameter}'; give the parameter to an optimizer in the constructor, or load "
                "the file into an actor without optimizers"
            )
        raise ValueError(
            f"{opened.path} has '{name}', and {actors[owner].name} has no such tensor yet, so its "
            "numbers would be lost; make the tensor in the constructor, and not in the first update"
        )


def _pieces(actors: Mapping[str, ActorHandle]) -> list[SavedPiece]:
    own_pieces: list[SavedPiece] = []
    for prefix, actor in actors.items():
        own_pieces += pieces(actor, _named(prefix))
        own_pieces += optimizer_pieces(actor, _named(f"optimizer.{prefix}"))
    return own_pieces


def _named(prefix: str) -> NameOf:
    return lambda state: prefix + state.path


def check_state(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> set[str]:
    """Compare a file with the tensors of an actor that this process holds.

    Returns:
        Their names.

    Raises:
        KeyError: the file lacks one.
        ValueError: it has one of another shape or element type.
    """
    names: set[str] = set()
    for piece in pieces(actor, name_of):
        if piece.name not in opened:
            raise KeyError(f"the file has no tensor '{piece.name}', which {actor.name} has")
        opened.check(piece.name, piece.shape, piece.tensor.dtype)
        names.add(piece.name)
    return names


def fill_state(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Give the tensors of an actor the numbers of a file."""
    for piece in pieces(actor, name_of):
        piece.tensor.data.copy_(opened.read(piece.name, piece.region))


def check_optimizers(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> set[str]:
    """Compare a file's tensors of an actor's optimizers with their parameters.

    Returns:
        The names of the tensors that the optimizers take.

    Raises:
        ValueError: a tensor cannot be cut as its parameter is. Or parameters of one kind have
            different tensors, so that an update would not find what it needs.
    """
    names = set()
    keys: dict[Hashable, dict[str, set[str]]] = {}
    for entry in _kept(opened, actor, name_of):
        names.add(f"{entry.parameter_name}.{entry.key}")
        kind = _kind(entry.optimizer, entry.parameter.tensor)
        if kind is not None:
            keys.setdefault(kind, {}).setdefault(entry.parameter_name, set()).add(entry.key)
    for alike in keys.values():
        _refuse_differing(opened.path, alike)
    return names


def _kind(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Hashable | None:
    """The kind of a parameter: for all of one kind an optimizer keeps tensors by the same keys.

    Returns:
        None if that is not known: optimizers that are not torch's choose keys as they like.
    """
    options = group_with(optimizer, parameter)
    if options is None or not type(optimizer).__module__.startswith("torch.optim"):
        return None
    by_dimensions = isinstance(optimizer, torch.optim.Adafactor)
    return (
        type(optimizer),
        *(bool(options.get(name)) for name in ("amsgrad", "centered", "momentum")),
        by_dimensions and parameter.dim() > 1,
    )


def _refuse_differing(path: Path, keys: Mapping[str, set[str]]) -> None:
    """Refuse parameters with other keys than most of their kind have.

    Raises:
        ValueError: there is one.
    """
    usual = Counter(map(frozenset, keys.values())).most_common(1)[0][0]
    usual_name = next(name for name, own_keys in keys.items() if own_keys == usual)
    for name, own_keys in keys.items():
        if own_keys != usual:
            raise ValueError(
                f"{path} is damaged: an optimizer keeps {_listed(own_keys)} for '{name}', and "
                f"{_listed(usual)} for '{usual_name}'; load a file that is whole, or give the "
                "actor no optimizer"
            )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))


def fill_optimizers(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Give an actor's optimizers the tensors that a file has for their parameters."""
    for entry in _kept(opened, actor, name_of):
        value = opened.read(f"{entry.parameter_name}.{entry.key}", entry.region)
        parameter = entry.parameter.tensor
        moved = value.to(parameter.device) if value.shape or entry.on_device else value
        entry.optimizer.state[parameter][entry.key] = moved


@dataclass(frozen=True)
class _SavedState:
    """A tensor of a file that an optimizer keeps for a parameter.

    Attributes:
        optimizer: keeps it.
        parameter: the parameter that it is kept for.
        parameter_name: in the file.
        key: by which the optimizer finds it.
        region: the part that a rank holds.
        on_device: whether it is on the parameter's device also if it is a number.
    """

    optimizer: torch.optim.Optimizer
    parameter: StateTensor
    parameter_name: str
    key: str
    region: Region
    on_device: bool


def _kept(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> Iterator[_SavedState]:
    """All that a file has for an actor's optimizers on the ranks of this process.

    Raises:
        ValueError: a tensor cannot be cut as its parameter is.
    """
    keys: dict[str, list[str]] = {}
    for full in sorted(opened.shapes):
        parameter, _, key = full.rpartition(".")
        keys.setdefault(parameter, []).append(key)
    group = actor._member.group
    for rank, instance in actor.instances.items():
        state = collect(instance)
        trainers = optimizers_of(state)
        for state_tensor in state.tensors:
            name = name_of(state_tensor)
            if name is None:
                continue
            for optimizer in trainers:
                options = group_with(optimizer, state_tensor.tensor)
                if options is None:
                    continue
                for key in keys.get(name, ()):
                    full = f"{name}.{key}"
                    region = region_like(full, opened.shapes[full], state_tensor, group, rank)
                    yield _SavedState(
                        optimizer, state_tensor, name, key, region, _is_on_device(options)
                    )


def _is_on_device(options: Mapping[str, Any]) -> bool:
    """Whether torch keeps also the numbers of a group's parameters on their device."""
    return bool(options.get("capturable") or options.get("fused"))
