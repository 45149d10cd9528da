"""Weights in the folder format of Hugging Face: safetensors files, an index, and a configuration.

The format: https://huggingface.co/docs/transformers/models, `model.safetensors`, or several files
of tensors and `model.safetensors.index.json`, which says where each tensor is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from ...ir.layout import Region
from ...tracer.values.specs import torch_dtype
from .tensor_files import Table, TensorFile, size_of

Rename: TypeAlias = Callable[[str], str | None]
"""The name of a tensor in the files, by its name in the model; None if it is not there."""

_OTHER_FORMATS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")


class Weights:
    """The tensors of a folder, which are read piece by piece; a source for `Cls.on(init=...)`.

    Attributes:
        folder: where they are.
        files: the file of each tensor, by the tensor's name.
    """

    def __init__(self, folder: Path, stem: str, rename: Rename) -> None:
        self.folder = folder
        self._stem, self._rename = stem, rename
        self._tied: dict[str | None, tuple[str, ...]] = {}
        self.files = {name: file for file in self._open() for name in file.shapes}

    def __repr__(self) -> str:
        return f"the weights in {self.folder}"

    def check(self, model: nn.Module) -> None:
        """Compare the names and shapes of a whole model's tensors with those of the folder.

        For a tied parameter, one of its names is enough. The weights then know all of them, for
        actors that have the parameter under another name.

        Args:
            model: it may be on the meta device.

        Raises:
            ValueError: tensors are missing, surplus, or of other shapes or kinds of types.
        """
        tensors = model.state_dict(keep_vars=True)
        paths: dict[int, list[str]] = {}
        for path, tensor in tensors.items():
            paths.setdefault(id(tensor), []).append(path)
        name_of = self._named(self._prefix(tensors))
        for tied in paths.values():
            names = tuple(filter(None, map(name_of, tied)))
            self._tied |= dict.fromkeys(names, names) if len(names) > 1 else {}
        distinct = {n[0]: tensors[n[0]] for n in paths.values() if any(map(name_of, n))}
        stored_names = self.names(distinct, type(model).__name__)
        taken = {name for name in map(name_of, tensors) if name} | {*stored_names.values()}
        surplus = [n for n in self.files if n not in taken and not _is_ignored(model, n)]
        if surplus:
            raise ValueError(
                f"{self.folder} has tensors that {type(model).__name__} has not: "
                f"{_few(surplus)}; is it of another model, or of other layers?"
            )

    def names(self, wanted: Mapping[str, torch.Tensor], actor: str) -> Mapping[str, str]:
        """The names in the files of an actor's tensors, by their paths.

        Paths and names may differ by a prefix: an actor's attributes, or the name of a model
        without a head.

        Raises:
            ValueError: tensors are missing, or of other shapes or kinds of types.
        """
        prefix = self._prefix(wanted)
        name_of = self._named(prefix)
        stored_names, missing = {}, []
        for path, tensor in wanted.items():
            name = self._stored(name_of(path))
            if name is None:
                missing.append(path.removeprefix(prefix))
                continue
            stored_names[path] = name
            self._compare(name, tensor)
        if missing:
            raise ValueError(
                f"{self.folder} lacks tensors that {actor} has: {_few(missing)}; it has "
                f"{_few(list(self.files))}. If the model's library renames or joins tensors as it "
                "loads them, load it there, and write the model's state_dict() as safetensors. If "
                "it has a tied parameter under its other name, call check(model) of the weights"
            )
        return stored_names

    def read(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """The part of a tensor in a region, as an element type; only that part is read."""
        return self.files[name].read(name, region).to(dtype)

    def _stored(self, name: str | None) -> str | None:
        """The name by which the files have a tensor; None if they do not have it."""
        return next((n for n in self._tied.get(name, (name,)) if n in self.files), None)

    def _named(self, prefix: str) -> Callable[[str], str | None]:
        return lambda path: self._rename(path.removeprefix(prefix))

    def _prefix(self, paths: Iterable[str]) -> str:
        """The prefix of paths in front of names: the shortest with which a name is found."""
        for path in paths:
            parts = path.split(".")
            for start in range(len(parts)):
                name = self._rename(".".join(parts[start:]))
                if self._stored(name) is not None:
                    return "".join(f"{part}." for part in parts[:start])
        return ""

    def _compare(self, name: str, tensor: torch.Tensor) -> None:
        shape, dtype = self.files[name].shapes[name], self.files[name].dtypes[name]
        if not _converts(dtype, tensor.dtype):
            message = f"'{name}' is {dtype} in {self.folder}, and {tensor.dtype} here"
            if tensor.is_floating_point():  # scales, if there are any, would not be applied
                message += "; a quantized model has to be written in float32, float16 or bfloat16"
            raise ValueError(message)
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"'{name}' is {list(shape)} in {self.folder}, and {list(tensor.shape)} in the model"
            )

    def _open(self) -> list[TensorFile]:
        index = self.folder / f"{self._stem}.safetensors.index.json"
        single = self.folder / f"{self._stem}.safetensors"
        if not index.exists():
            if not single.exists():
                raise self._no_weights()
            return [TensorFile(single)]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map, which says where each tensor is")
        opened = {}
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).exists():
                raise ValueError(f"{index} names {file}, which is not in {self.folder}")
            opened[file] = TensorFile(self.folder / file)
        for name, file in weight_map.items():
            if name not in opened[file]:
                raise ValueError(f"{index} says that '{name}' is in {file}, which has it not")
        return list(opened.values())

    def _no_weights(self) -> FileNotFoundError:
        other_files = [
            file.name for pattern in _OTHER_FORMATS for file in self.folder.glob(pattern)
        ]
        if not self.folder.is_dir():
            return FileNotFoundError(f"{self.folder} is no folder, so no model can be read from it")
        why = f"; it has {_few(other_files)}, which are of other formats" if other_files else ""
        return FileNotFoundError(
            f"{self.folder} has neither {self._stem}.safetensors nor "
            f"{self._stem}.safetensors.index.json{why}; write one with the model's save_pretrained"
        )


def pretrained(
    folder: str | os.PathLike[str], *, rename: Rename = str, stem: str = "model"
) -> Weights:
    """Open a folder of weights, as `save_pretrained` of transformers writes it.

    An actor takes its weights from it piece by piece, so that no rank reads or holds more than its
    own. Floating-point numbers are converted to the model's type.

    ```python
    weights = cg.pretrained(folder)
    weights.check(model)
    stage = Stage.on(cg.mesh(dp=2, tp=2), plan=plan, init=weights)(cuts, 0)
    ```

    Args:
        folder: with `model.safetensors`, or several such files and their index.
        rename: what the folder calls a tensor of the model, by its name; names that differ by a
            prefix alone are found without it.
        stem: of the names of files.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: a file is damaged, or the index does not fit.
    """
    return Weights(Path(folder), stem, rename)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        ValueError: it is damaged.
        FileNotFoundError: it is not there.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, where an object is expected")
    return content


@dataclass(frozen=True)
class Shard:
    """One of the files of a folder.

    Attributes:
        file: its name.
        table: its tensors.
    """

    file: str
    table: Table


def shards(table: Table, stem: str, largest: int) -> Iterator[Shard]:
    """Share tensors out to files of at most `largest` bytes, or of one tensor."""
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for name, entry in table.items():
        size += size_of(table, name)
        if parts[-1] and size > largest:
            parts.append({})
            size = size_of(table, name)
        parts[-1][name] = entry
    if len(parts) == 1:
        yield Shard(f"{stem}.safetensors", parts[0])
        return
    for number, part in enumerate(parts, 1):
        yield Shard(f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors", part)


def index_of(files: Iterable[Shard]) -> dict[str, Any]:
    """The index of several files."""
    tables = list(files)
    total = sum(size_of(shard.table, name) for shard in tables for name in shard.table)
    weight_map = {name: shard.file for shard in tables for name in shard.table}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def dtype_of(table: Table) -> str | None:
    """The floating-point type of a table's tensors, as configurations name it, such as `float32`.

    None if there are several types, or none.
    """
    dtypes = {dtype for dtype, _ in table.values() if dtype.is_differentiable}
    return str(torch_dtype(*dtypes)).removeprefix("torch.") if len(dtypes) == 1 else None


def _converts(stored: torch.dtype | None, expected: torch.dtype) -> bool:
    """Whether a file's numbers convert to a type; one-byte floats are quantized, and do not."""
    if stored is None or stored.is_floating_point != expected.is_floating_point:
        return False
    return not stored.is_floating_point or stored.itemsize > 1 or stored == expected


@runtime_checkable
class _Ignores(Protocol):
    """A model of transformers, which names surplus tensors that older files have."""

    _keys_to_ignore_on_load_unexpected: Iterable[str] | None


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether a model says that it ignores a tensor which files may have."""
    patterns = model._keys_to_ignore_on_load_unexpected if isinstance(model, _Ignores) else None
    return any(re.search(pattern, name) for pattern in patterns or ())


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
