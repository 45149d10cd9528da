"""Save and load the tensors of actors: one safetensors file, whatever ranks hold them.

A file holds logical tensors by name. Each rank writes the pieces that it holds, straight to where
they belong in the file, and reads those that it needs. So other meshes can go on from it. The
format: https://huggingface.co/docs/safetensors, a header of JSON and the elements behind it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ...ir.layout import Interval, Region, shape_of, whole
from ...ir.types import DType
from ...tracer.actors.actor_state import StateTensor, collect
from ...tracer.actors.actors import ActorHandle
from ...tracer.groups.group import GroupActor
from ...tracer.step.specs import ir_dtype
from ..world.world import world

_NAMES = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8E4M3: "F8_E4M3",
    DType.F8E5M2: "F8_E5M2",
    DType.C64: "C64",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I16: "I16",
    DType.I8: "I8",
    DType.U64: "U64",
    DType.U32: "U32",
    DType.U16: "U16",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
}


@dataclass(frozen=True)
class _Piece:
    """A rank's piece of a logical tensor, and whether it is the one that writes it."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    counts: bool


def save(file: str | os.PathLike[str], actors: Mapping[str, ActorHandle]) -> None:
    """Write the tensors of actors, and of their optimizers, as one safetensors file; collective.

    The file appears when it is complete. All ranks see one file system.

    Args:
        file: its name.
        actors: by the prefix of their tensors' names: the tensor `up.weight` of the actor `"0."` is
            `0.up.weight`, and of its optimizer's state `optimizer.0.up.weight.exp_avg`.

    Raises:
        ValueError: two tensors have one name, or one has an element type without a name there.
        OSError: a rank could not write.
    """
    path = Path(file)
    partial = path.with_name(f".{path.name}.partial")
    pieces = [piece for prefix, actor in actors.items() for piece in _pieces(prefix, actor)]
    table = _table([(p.name, ir_dtype(p.tensor.dtype), p.shape) for p in pieces if p.counts])
    header, offsets = _header(table)
    if world().rank == 0:
        _together(lambda: _create(partial, header, offsets))
    else:
        _together(lambda: None)
    start = 8 + len(header)
    _together(lambda: _write_all(partial, start, offsets, pieces))
    _together(lambda: os.replace(partial, path) if world().rank == 0 else None)


def load(file: str | os.PathLike[str], actors: Mapping[str, ActorHandle]) -> None:
    """Fill the tensors of actors, and their optimizers, from a file that `save` has written.

    The ranks, meshes and plans may be others than those that have written it. What an optimizer
    keeps for a parameter is made where the file has it.

    Args:
        file, actors: as for `save`.

    Raises:
        KeyError: the file lacks a tensor that an actor has.
        ValueError: a tensor has another shape or element type in the file.
    """
    with safe_open(os.fspath(file), framework="pt") as opened:
        names = set(opened.keys())
        for prefix, actor in actors.items():
            for rank in actor.instances:
                _fill(opened, names, prefix, actor, rank)


def _fill(opened: Any, names: set[str], prefix: str, actor: ActorHandle, rank: int) -> None:
    group = actor._member.group
    state = collect(actor.instances[rank])
    for each in state.tensors:
        name = prefix + each.path
        if name not in names:
            raise KeyError(f"the file has no tensor '{name}', which {actor.name} has")
        shape, region = _held(each, group, rank)
        each.tensor.data.copy_(_read(opened, name, shape, region, each.tensor.dtype))
        kept = f"optimizer.{name}."
        for key in sorted(n.removeprefix(kept) for n in names if n.startswith(kept)):
            for trainer in state.trainers:
                _fill_optimizer(opened, kept + key, key, trainer, each, region)


def _fill_optimizer(
    opened: Any, name: str, key: str, trainer: Any, state: StateTensor, region: Region
) -> None:
    """Fill what an optimizer keeps for a parameter; nothing, if it does not train that."""
    if not isinstance(trainer, torch.optim.Optimizer):
        return
    if all(p is not state.tensor for group in trainer.param_groups for p in group["params"]):
        return
    found = opened.get_slice(name)
    shape = tuple(found.get_shape())
    own = region if len(shape) == len(region) else whole(shape)
    value = _read(opened, name, shape, own, None)
    trainer.state[state.tensor][key] = value.to(state.tensor.device) if shape else value


def _pieces(prefix: str, actor: ActorHandle) -> Iterator[_Piece]:
    """The pieces of an actor, and of its optimizers' state, that this process's ranks hold."""
    group = actor._member.group
    for rank, instance in actor.instances.items():
        state = collect(instance)
        for each in state.tensors:
            shape, region = _held(each, group, rank)
            counts = _counts(group, each.path, rank)
            yield _Piece(prefix + each.path, each.tensor, shape, region, counts)
            for trainer in state.trainers:
                kept = trainer.state.get(each.tensor, {}) if _is_optimizer(trainer) else {}
                for key, value in kept.items():
                    if isinstance(value, torch.Tensor):
                        same = value.shape == each.tensor.shape
                        like = (shape, region) if same else (tuple(value.shape), whole(value.shape))
                        name = f"optimizer.{prefix}{each.path}.{key}"
                        first = counts if same else _counts(group, None, rank)
                        yield _Piece(name, value, *like, first)


def _is_optimizer(trainer: object) -> bool:
    return isinstance(trainer, torch.optim.Optimizer)


def _held(
    state: StateTensor, group: GroupActor | None, rank: int
) -> tuple[tuple[int, ...], Region]:
    """The shape of the logical tensor, and the part of it that a rank holds."""
    logical = None if group is None else group.logical.get(state.path)
    if group is None or logical is None or logical.layout is None:
        shape = tuple(state.tensor.shape)
        return shape, whole(shape)
    return logical.shape, logical.layout.region(logical.shape, group.mesh.position(rank))


def _counts(group: GroupActor | None, path: str | None, rank: int) -> bool:
    """True if the rank is the first of those that hold copies of a piece."""
    if group is None:
        return True
    logical = group.logical.get(path) if path is not None else None
    cutting = () if logical is None or logical.layout is None else logical.layout.axes
    position = group.mesh.position(rank)
    return all(position[axis][0] == 0 for axis, _ in group.mesh.grid if axis not in cutting)


def _table(
    mine: list[tuple[str, DType, tuple[int, ...]]],
) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """All tensors by name, sorted; the same on all ranks."""
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for theirs in world().allgather(mine):
        for name, dtype, shape in theirs:
            if found.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"two tensors have the name '{name}'; give prefixes that differ")
    for name, (dtype, _) in found.items():
        if dtype not in _NAMES:
            raise ValueError(f"'{name}' is {dtype}, which safetensors has no name for")
    return dict(sorted(found.items()))


def _header(
    table: Mapping[str, tuple[DType, tuple[int, ...]]],
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header behind its length, and where each tensor begins and ends behind it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in table.items():
        end = at + math.prod(shape) * dtype.itemsize
        offsets[name] = at, end
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), offsets


def _create(partial: Path, header: bytes, offsets: Mapping[str, tuple[int, int]]) -> None:
    with partial.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + max((end for _, end in offsets.values()), default=0))


def _write_all(
    partial: Path, start: int, offsets: Mapping[str, tuple[int, int]], pieces: list[_Piece]
) -> None:
    for piece in pieces:
        if piece.counts:
            _write(partial, start, offsets, piece)


def _write(
    partial: Path, start: int, offsets: Mapping[str, tuple[int, int]], piece: _Piece
) -> None:
    local = shape_of(piece.region)
    if not math.prod(local):
        return
    size = piece.tensor.element_size()
    flat = piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    unit = np.dtype((np.void, size))
    held = flat.view(unit).reshape(local)
    at = start + offsets[piece.name][0]
    file = np.memmap(partial, unit, "r+", at, piece.shape or (1,))
    if not piece.shape:
        file[0] = held
    for here, there in _boxes(piece.region):
        file[there] = held[here]
    file.flush()


def _read(
    opened: Any, name: str, shape: tuple[int, ...], region: Region, dtype: torch.dtype | None
) -> torch.Tensor:
    """The part of a tensor of a file in a region."""
    found = opened.get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise ValueError(f"'{name}' is {found.get_shape()} in the file, and {list(shape)} here")
    if not shape:
        value: torch.Tensor = opened.get_tensor(name).clone()
    else:
        parts = [(here, found[there]) for here, there in _boxes(region)]
        kind = found[tuple(slice(0, 0) for _ in shape)].dtype
        value = torch.empty(shape_of(region), dtype=kind)
        for here, part in parts:
            value[here] = part
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"'{name}' is {value.dtype} in the file, and {dtype} here")
    return value


def _boxes(region: Region) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of a region: where each stands in what holds the region, and in the tensor."""
    for chosen in itertools.product(*map(_runs, region)):
        yield tuple(here for here, _ in chosen), tuple(there for _, there in chosen)


def _runs(intervals: tuple[Interval, ...]) -> Iterator[tuple[slice, slice]]:
    at = 0
    for start, stop in intervals:
        yield slice(at, at + stop - start), slice(start, stop)
        at += stop - start


def _together(work: Any) -> None:
    """Do something on each rank; where one fails, all do.

    Raises:
        OSError: one has failed.
    """
    failed: Exception | None = None
    try:
        work()
    except OSError as error:
        failed = error
    told = world().allgather(None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for rank, words in enumerate(told):
        if words is not None:
            raise OSError(f"rank {rank} could not write: {words}")
