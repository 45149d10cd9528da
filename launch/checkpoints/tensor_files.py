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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ...ir.layout import Interval, Region, shape_of
from ...ir.types import DType
from ...tracer.actors.actor_state import StateTensor, collect
from ...tracer.actors.actors import ActorHandle
from ...tracer.actors.optimizer_state import optimizers_of
from ...tracer.step.specs import ir_dtype, torch_dtype
from ..world.world import world
from .held import NameOf, Piece, group_with, optimizer_pieces, pieces, region_like
from .together import on_rank_0, together

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

_TYPES = {word: torch_dtype(dtype) for dtype, word in _NAMES.items()}
"""Torch's element types, by what the format calls them."""

Table: TypeAlias = Mapping[str, tuple[DType, tuple[int, ...]]]
"""The element type and the shape of tensors, by name."""


def save(file: str | os.PathLike[str], actors: Mapping[str, ActorHandle]) -> None:
    """Write the tensors of actors, and of their optimizers, as one safetensors file; collective.

    The file appears when it is complete. All ranks see one file system.

    Args:
        file: its name.
        actors: by the prefix of their tensors' names: the tensor `up.weight` of the actor `"0."` is
            `0.up.weight`, and of its optimizer's state `optimizer.0.up.weight.exp_avg`.

    Raises:
        ValueError: two tensors have one name, or one has an element type without a name there. Or
            an optimizer keeps a tensor that cannot be cut as its parameter is, or state that is no
            tensor or belongs to no parameter.
        OSError: a rank could not write.
    """
    path = Path(file)
    partial = path.with_name(f".{path.name}.partial")
    mine = together(lambda: _pieces(actors), "name its tensors")
    write(partial, table_of(mine), mine)
    on_rank_0(lambda: replace(partial, path))


def load(file: str | os.PathLike[str], actors: Mapping[str, ActorHandle]) -> None:
    """Fill the tensors of actors, and their optimizers, from a file that `save` has written.

    The ranks, meshes and plans may be others than those that have written it. What an optimizer
    keeps for a parameter is made as the file has it, in its shape and element type.

    Args:
        file, actors: as for `save`.

    Raises:
        KeyError: the file lacks a tensor that an actor has.
        ValueError: a tensor has another shape or element type in the file, or the file is damaged.
            Nothing has been filled.
    """
    opened = TensorFile(Path(file))
    for prefix, actor in actors.items():
        check_state(opened, actor, _named(prefix))
        check_optimizers(opened, actor, _named(f"optimizer.{prefix}"))
    for prefix, actor in actors.items():
        fill_state(opened, actor, _named(prefix))
        fill_optimizers(opened, actor, _named(f"optimizer.{prefix}"))


def _pieces(actors: Mapping[str, ActorHandle]) -> list[Piece]:
    mine: list[Piece] = []
    for prefix, actor in actors.items():
        mine += pieces(actor, _named(prefix))
        mine += optimizer_pieces(actor, _named(f"optimizer.{prefix}"))
    return mine


def _named(prefix: str) -> NameOf:
    return lambda state: prefix + state.path


class TensorFile:
    """A safetensors file that is read: tensors by name.

    Attributes:
        path: of the file.
        shapes: of its tensors, by name.
        dtypes: likewise; None where cg has no name for the type.

    Raises:
        ValueError: it is damaged.
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(os.fspath(path), framework="pt") as opened:
                found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                self.shapes = {name: tuple(each.get_shape()) for name, each in found.items()}
                self.dtypes = {name: _TYPES.get(each.get_dtype()) for name, each in found.items()}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compare a tensor of the file with what is wanted.

        Raises:
            ValueError: it has another shape or element type.
        """
        found = self.shapes[name]
        if found != shape:
            raise ValueError(f"'{name}' is {list(found)} in the file, and {list(shape)} here")
        if self.dtypes[name] != dtype:
            raise ValueError(f"'{name}' is {self.dtypes[name]} in the file, and {dtype} here")

    def read(self, name: str, region: Region) -> torch.Tensor:
        """The part of a tensor in a region, in memory of its own.

        The file is opened for the one tensor. Else the pages that have been read would stay in
        memory beside the tensors.

        Raises:
            ValueError: the region is no part of the tensor.
        """
        shape = self.shapes[name]
        ends = [max((stop for _, stop in each), default=0) for each in region]
        if len(ends) != len(shape) or any(e > size for e, size in zip(ends, shape, strict=True)):
            raise ValueError(f"'{name}' is {list(shape)} in the file, and ends at {ends} here")
        with safe_open(os.fspath(self.path), framework="pt") as opened:
            if not region:
                return opened.get_tensor(name).clone()  # type: ignore[no-any-return]
            found = opened.get_slice(name)
            value = torch.empty(shape_of(region), dtype=self.dtypes[name])
            for here, there in _boxes(region):
                value[here] = found[there]
            return value


def check_state(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Compare what a file has with the tensors of an actor, as far as this process holds it.

    Raises:
        KeyError: the file lacks one.
        ValueError: it has one of another shape or element type.
    """
    for piece in pieces(actor, name_of):
        if piece.name not in opened:
            raise KeyError(f"the file has no tensor '{piece.name}', which {actor.name} has")
        opened.check(piece.name, piece.shape, piece.tensor.dtype)


def fill_state(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Give the tensors of an actor the numbers of a file."""
    for piece in pieces(actor, name_of):
        piece.tensor.data.copy_(opened.read(piece.name, piece.region))


def check_optimizers(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Compare what a file has for an actor's optimizers with their parameters.

    Raises:
        ValueError: a tensor cannot be cut as its parameter is.
    """
    for _ in _kept(opened, actor, name_of):
        pass


def fill_optimizers(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> None:
    """Give an actor's optimizers what a file has for their parameters."""
    for each in _kept(opened, actor, name_of):
        value = opened.read(f"{each.parameter_name}.{each.key}", each.region)
        parameter = each.parameter.tensor
        own = value.to(parameter.device) if value.shape or each.on_device else value
        each.optimizer.state[parameter][each.key] = own


@dataclass(frozen=True)
class _Kept:
    """A tensor of a file that an optimizer keeps for a parameter.

    Attributes:
        optimizer: keeps it.
        parameter: what it is kept for.
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


def _kept(opened: TensorFile, actor: ActorHandle, name_of: NameOf) -> Iterator[_Kept]:
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
        for each in state.tensors:
            name = name_of(each)
            if name is None:
                continue
            for optimizer in trainers:
                options = group_with(optimizer, each.tensor)
                if options is None:
                    continue
                for key in keys.get(name, ()):
                    full = f"{name}.{key}"
                    region = region_like(full, opened.shapes[full], each, group, rank)
                    yield _Kept(optimizer, each, name, key, region, _is_on_device(options))


def _is_on_device(options: Mapping[str, Any]) -> bool:
    """Whether torch keeps also the numbers of a group's parameters on their device."""
    return bool(options.get("capturable") or options.get("fused"))


# -- writing ------------------------------------------------------------------------------------


def table_of(mine: Iterable[Piece]) -> Table:
    """All tensors that ranks write, by name, sorted; the same on all ranks. Collective.

    Raises:
        ValueError: two tensors have one name, or one has an element type without a name there.
    """
    own = [(p.name, ir_dtype(p.tensor.dtype), p.shape) for p in mine if p.counts]
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for theirs in world().allgather(own):
        for name, dtype, shape in theirs:
            if found.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"two tensors have the name '{name}'; give prefixes that differ")
    for name, (dtype, _) in found.items():
        if dtype not in _NAMES:
            raise ValueError(f"'{name}' is {dtype}, which safetensors has no name for")
    return dict(sorted(found.items()))


def size_of(table: Table, name: str) -> int:
    """The bytes of a tensor of a table."""
    dtype, shape = table[name]
    return math.prod(shape) * dtype.itemsize


def write(path: Path, table: Table, mine: Sequence[Piece]) -> None:
    """Write a file of the tensors of a table, of which this process has pieces; collective.

    When it returns, the file is on the disk.

    Raises:
        OSError: a rank could not write.
    """
    header, offsets = _header(table)
    on_rank_0(lambda: _create(path, header, offsets))
    start = 8 + len(header)
    own = [piece for piece in mine if piece.counts and piece.name in table]
    together(lambda: _write_all(path, start, offsets, own))


def replace(partial: Path, path: Path) -> None:
    """Give what is complete its name, for good."""
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _header(table: Table) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header behind its length, and where each tensor begins and ends behind it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in table.items():
        end = at + size_of(table, name)
        offsets[name] = at, end
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), offsets


def _create(path: Path, header: bytes, offsets: Mapping[str, tuple[int, int]]) -> None:
    with path.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + max((end for _, end in offsets.values()), default=0))


def _write_all(
    path: Path, start: int, offsets: Mapping[str, tuple[int, int]], mine: Iterable[Piece]
) -> None:
    for piece in mine:
        _write(path, start, offsets, piece)
    sync(path)


def _write(path: Path, start: int, offsets: Mapping[str, tuple[int, int]], piece: Piece) -> None:
    local = shape_of(piece.region)
    if not math.prod(local):
        return
    size = piece.tensor.element_size()
    flat = piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    unit = np.dtype((np.void, size))
    own = flat.view(unit).reshape(local)
    at = start + offsets[piece.name][0]
    file = np.memmap(path, unit, "r+", at, piece.shape or (1,))
    if not piece.shape:
        file[0] = own
    for here, there in _boxes(piece.region):
        file[there] = own[here]
    file.flush()


def _boxes(region: Region) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of a region: where each stands in what holds the region, and in the tensor."""
    for chosen in itertools.product(*map(_runs, region)):
        yield tuple(here for here, _ in chosen), tuple(there for _, there in chosen)


def _runs(intervals: tuple[Interval, ...]) -> Iterator[tuple[slice, slice]]:
    at = 0
    for start, stop in intervals:
        yield slice(at, at + stop - start), slice(start, stop)
        at += stop - start
