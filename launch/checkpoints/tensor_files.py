"""Files of tensors, as safetensors: each rank writes and reads pieces of them.

Each rank writes the pieces that it holds straight to where they belong in the file. The format:
https://huggingface.co/docs/safetensors, a header of JSON and the elements behind it.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ...ir.layout import Interval, Region, shape_of
from ...ir.types import DType
from ...tracer.values.specs import ir_dtype, torch_dtype
from ..conversions.composition import Composition
from ..world.world import world
from .held import SavedPiece
from .stored_tensor import ReadBox, StoredTensor
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

PREFIXES = "cg.prefixes"
"""The entry of a file's metadata that says which actors it has, by their prefixes."""

_TYPES = {word: torch_dtype(dtype) for dtype, word in _NAMES.items()}
"""Torch's element types, by their names in the format."""

Table: TypeAlias = Mapping[str, tuple[DType, tuple[int, ...]]]
"""The element type and the shape of tensors, by name."""


class TensorFile:
    """A safetensors file that is read: tensors by name.

    Attributes:
        path: of the file.
        shapes: of its tensors, by name.
        dtypes: likewise; None where cg has no name for the type.
        prefixes: of the actors that `save` has written; empty for other files.

    Raises:
        ValueError: it is damaged.
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(os.fspath(path), framework="pt") as opened:
                words = opened.metadata() or {}
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                self.shapes = {
                    name: tuple(tensor_slice.get_shape()) for name, tensor_slice in slices.items()
                }
                self.dtypes = {
                    name: _TYPES.get(tensor_slice.get_dtype())
                    for name, tensor_slice in slices.items()
                }
            self.prefixes: list[str] = json.loads(words.get(PREFIXES, "[]"))
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compare the shape and element type of a tensor in the file with those of an actor's.

        Raises:
            ValueError: it has another shape or element type.
        """
        self.tensor(name).check(name, shape, dtype)

    def tensor(self, name: str) -> StoredTensor:
        """A tensor of the file."""
        return StoredTensor(Composition.of(name, self.shapes[name]), {name: self})

    @contextmanager
    def opened(self) -> Iterator[ReadBox]:
        """Inside of the `with` block boxes are read by the function that it gives."""
        with safe_open(os.fspath(self.path), framework="pt") as opened:
            yield lambda name, box: opened.get_slice(name)[box] if box else opened.get_tensor(name)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """The part of a tensor in a region, in memory of its own.

        Raises:
            ValueError: the region is no part of the tensor, or its element type is none of torch's.
        """
        shape = self.shapes[name]
        ends = [max((stop for _, stop in intervals), default=0) for intervals in region]
        if len(ends) != len(shape) or any(e > size for e, size in zip(ends, shape, strict=True)):
            raise ValueError(f"'{name}' is {list(shape)} in the file, and ends at {ends} here")
        dtype = self.dtypes[name]
        if dtype is None:
            raise ValueError(f"'{name}' has an element type in the file that torch has not")
        return self.tensor(name).read(region, dtype)


def table_of(mine: Iterable[SavedPiece]) -> Table:
    """All tensors that ranks write, by name, sorted; the same on all ranks. Collective.

    Raises:
        ValueError: two tensors have one name, or safetensors has no name for an element type.
    """
    entries = [(p.name, ir_dtype(p.tensor.dtype), p.shape) for p in mine if p.counts]
    table: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for rank_entries in world().allgather(entries):
        for name, dtype, shape in rank_entries:
            if table.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"two tensors have the name '{name}'; give prefixes that differ")
    for name, (dtype, _) in table.items():
        if dtype not in _NAMES:
            raise ValueError(f"'{name}' is {dtype}, which safetensors has no name for")
    return dict(sorted(table.items()))


def size_of(table: Table, name: str) -> int:
    """The bytes of a tensor of a table."""
    dtype, shape = table[name]
    return math.prod(shape) * dtype.itemsize


def write(
    path: Path, table: Table, mine: Sequence[SavedPiece], words: Mapping[str, str] | None = None
) -> None:
    """Write a file of the tensors of a table, of which this process has pieces; collective.

    When it returns, the file is on the disk. Its space is reserved first: ranks write through
    memory maps, and there a full disk is a signal that ends the process.

    Args:
        words: further entries of its metadata.

    Raises:
        OSError: a rank could not write, such as on a full disk.
    """
    header, offsets = _header(table, words or {})
    on_rank_0(lambda: _create(path, header, offsets))
    start = 8 + len(header)
    pieces = [piece for piece in mine if piece.counts and piece.name in table]
    try:
        together(lambda: _write_all(path, start, offsets, pieces))
    except OSError:
        if world().rank == 0:
            path.unlink(missing_ok=True)  # for its space
        raise


def replace(partial: Path, path: Path) -> None:
    """Give a complete file or folder its name, and have that on the disk."""
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _header(table: Table, words: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header without its length, and where each tensor begins and ends behind the header."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **words}}
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
    """Make a file with its header and the space for all tensors, in place of an earlier job's.

    Raises:
        OSError: the file system lacks the space, or a folder has the name.
    """
    nbytes = 8 + len(header) + max((end for _, end in offsets.values()), default=0)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(
            errno.EISDIR,
            "a folder has the name of the file that is written first; remove it",
            os.fspath(path),
        )
    path.unlink(missing_ok=True)  # of a symbolic link that is the link itself
    with open(path, "xb", opener=_open_no_link) as opened:
        try:
            _reserve(opened.fileno(), nbytes)
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.flush()
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _with_bytes(error, path, nbytes) from error


def _with_bytes(error: OSError, path: Path, nbytes: int) -> OSError:
    """The error with its file; of a full disk also with the bytes that are needed."""
    words = error.strerror or str(error)
    if error.errno in _FULL:
        free = shutil.disk_usage(path.parent).free
        words += (
            f": {nbytes} bytes are needed, and {free} are free on its file system; make room, "
            "raise the quota or the limit (ulimit -f), or save elsewhere"
        )
    return OSError(error.errno, words, os.fspath(path))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors by which a system refuses space: of a disk, a quota, or a limit of the process."""
_ZEROS = bytes(1 << 20)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give an empty file its size, and blocks of the disk for all of it.

    Raises:
        OSError: there is no room.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise
        at = 0
        while at < nbytes:
            at += os.pwrite(descriptor, _ZEROS[: nbytes - at], at)


def _open_no_link(path: str, flags: int) -> int:
    """Open a file, and refuse a symbolic link: nobody may lead the save to another file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _write_all(
    path: Path, start: int, offsets: Mapping[str, tuple[int, int]], pieces: Iterable[SavedPiece]
) -> None:
    with open(path, "r+b", opener=_open_no_link) as opened:
        for piece in pieces:
            _write(opened, start, offsets, piece)
        os.fsync(opened.fileno())


def _write(
    opened: BinaryIO, start: int, offsets: Mapping[str, tuple[int, int]], piece: SavedPiece
) -> None:
    local = shape_of(piece.region)
    if not math.prod(local):
        return
    size = piece.tensor.element_size()
    flat = piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    unit = np.dtype((np.void, size))
    values = flat.view(unit).reshape(local)
    at = start + offsets[piece.name][0]
    file = np.memmap(opened, unit, "r+", at, piece.shape or (1,))
    if not piece.shape:
        file[0] = values
    for piece_box, tensor_box in _boxes(piece.region):
        file[tensor_box] = values[piece_box]
    file.flush()


def _boxes(region: Region) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of a region: the slices of each in a piece with that region, and in the tensor."""
    for chosen in itertools.product(*map(_runs, region)):
        yield (
            tuple(piece_slice for piece_slice, _ in chosen),
            tuple(tensor_slice for _, tensor_slice in chosen),
        )


def _runs(intervals: tuple[Interval, ...]) -> Iterator[tuple[slice, slice]]:
    at = 0
    for start, stop in intervals:
        yield slice(at, at + stop - start), slice(start, stop)
        at += stop - start
