"""Weights in the folder format of Hugging Face: files of tensors, an index, and a configuration.

The format: https://huggingface.co/docs/transformers/models, `model.safetensors`, or several files
of tensors and `model.safetensors.index.json`, which says where each tensor is. Older folders have
`pytorch_model.bin`, and an index likewise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from ...ir.layout import whole
from ...tracer.values.specs import torch_dtype
from ..conversions.conversion import Conversion, StoredType, as_stored
from ..conversions.hugging_face import conversion_of, library_model
from .pickled_file import PickledFile
from .stored_tensor import StoredTensor, WeightFile
from .tensor_files import Table, TensorFile, size_of

Rename: TypeAlias = Callable[[str], str | None]
"""The name of a tensor in the files, by its name in the model; None if it is not there."""

_OTHER_FORMATS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")


class Weights:
    """The tensors of a folder, which are read piece by piece; a source for `Cls.on(init=...)`.

    A model of transformers takes them as `from_pretrained` does: renamed, and joined, cut or turned
    where the model's modules differ from the files.

    Attributes:
        folder: where they are.
        files: the file of each tensor, by the tensor's name.
        converted: once `check` has seen a model, of each of its tensors that is no stored one of
            its name as it is, the names of the stored tensors that it consists of.
    """

    def __init__(self, folder: Path, stem: str, rename: Rename) -> None:
        self.folder = folder
        self._stem, self._rename = stem, rename
        self._tied: dict[str, tuple[str, ...]] = {}
        self.files = {name: file for file in self._open() for name in file.shapes}
        self.converted: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        words = f"the weights in {self.folder}"
        renamed = sum(len(names) == 1 for names in self.converted.values())
        if renamed:
            words += f", {renamed} under other names"
        if renamed < len(self.converted):
            stored = sum(len(names) for names in self.converted.values()) - renamed
            words += f", {len(self.converted) - renamed} joined from {stored} stored tensors"
        return words

    def check(self, model: nn.Module) -> None:
        """Compare the names and shapes of a whole model's tensors with those of the folder.

        For a tied parameter, one of its names is enough. The weights then know all of them, for
        actors that have the parameter under another name.

        Args:
            model: it may be on the meta device.

        Raises:
            ValueError: tensors are missing, surplus, or of other shapes or kinds of types; or
                transformers converts them by an operation that cg cannot follow.
        """
        tensors = model.state_dict(keep_vars=True)
        names, conversion = self._names(model, tensors)
        for several in names.values():
            self._tied |= dict.fromkeys(several, several) if len(several) > 1 else {}
        distinct = {t: path for path, t in reversed(tensors.items()) if names[path]}
        wanted = {path: tensor for tensor, path in distinct.items()}
        stored = self._stored(names, conversion, wanted, type(model).__name__)
        compositions = [
            conversion.compositions.get(n) for several in names.values() for n in several
        ]
        taken = {name for composition in compositions if composition for name in composition.names}
        surplus = [n for n in self.files if n not in taken and n not in conversion.ignored]
        if surplus:
            raise ValueError(
                f"{self.folder} has tensors that {type(model).__name__} has not: "
                f"{_few(surplus)}; is it of another model, or of other layers?"
            )
        self.converted = {
            names[path][0]: tensor.composition.names
            for path, tensor in stored.items()
            if not any(map(tensor.is_whole, names[path]))
        }

    def tensors(
        self, instance: object, wanted: Mapping[str, torch.Tensor], actor: str
    ) -> Mapping[str, StoredTensor]:
        """The tensors of the folder for an actor's, by their paths.

        The folder's names are those by which a model of transformers in the actor loads it. Without
        one, paths and names may differ by a prefix: an actor's attributes, or the name of a model
        without a head.

        Args:
            instance: the actor's instance, or a model.
            wanted: tensors of it with their whole shapes, by path.
            actor: its name, for messages.

        Raises:
            ValueError: tensors are missing, or of other shapes or kinds of types; or transformers
                converts them by an operation that cg cannot follow.
        """
        names, conversion = self._names(instance, wanted)
        return self._stored(names, conversion, wanted, actor)

    def differing(self, model: nn.Module) -> list[str]:
        """The names of tied parameters that the folder has several times, with other numbers.

        transformers unties those. Rows are compared a few at a time, which takes little memory.

        Args:
            model: it may be on the meta device.

        Raises:
            ValueError: transformers converts tensors by an operation that cg cannot follow.
        """
        names, conversion = self._names(model, model.state_dict(keep_vars=True))
        differing = []
        for several in dict.fromkeys(names.values()):
            tensors = [
                StoredTensor(conversion.compositions[name], self.files)
                for name in several
                if name in conversion.compositions
            ]
            if any(not tensors[0].equals(other) for other in tensors[1:]):
                differing.append(several[0])
        return differing

    def types(self, model: nn.Module, names: Iterable[str]) -> dict[str, StoredType]:
        """The shapes and element types of stored tensors that are tensors of a model as they are.

        Those of experts may be stacked.

        Args:
            model: it may be on the meta device.
            names: of tensors, also of such that the model has not.

        Returns:
            By name, those of the names that the folder has.

        Raises:
            ValueError: transformers converts tensors by an operation that cg cannot follow.
        """
        renamed = {name: self._rename(name) for name in names}
        candidates = dict.fromkeys(filter(None, renamed.values()), ())
        conversion = self.conversion(model, self.shapes(model) | candidates)
        types = {}
        for name, own in renamed.items():
            composition = conversion.compositions.get(own or "")
            if composition is not None:
                dtypes = {self.files[source].dtypes[source] for source in composition.names}
                if len(dtypes) == 1:
                    types[name] = StoredType(composition.shape, dtypes.pop())
        return types

    def shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The shapes of a model's tensors, by the names that its library has for them."""
        tensors = {self._rename(path): tensor for path, tensor in model.state_dict().items()}
        return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name is not None}

    def named(self, path: str) -> str | None:
        """The name of a model's tensor in the folder, or in its library; None if it has none."""
        return self._rename(path)

    def read(self, model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Small tensors of the folder, by the names that `types` takes.

        Raises:
            KeyError: the folder has no tensor of a name.
        """
        wanted = {name: self._rename(name) or "" for name in names}
        conversion = self.conversion(model, self.shapes(model) | dict.fromkeys(wanted.values(), ()))
        tensors: dict[str, torch.Tensor] = {}
        for name, own in wanted.items():
            stored = StoredTensor(conversion.compositions[own], self.files)
            dtype = next(iter(stored.dtypes.values()))
            assert dtype is not None, "it is of a type that the caller knows"
            tensors[name] = stored.read(whole(stored.composition.shape), dtype)
        return tensors

    def conversion(
        self,
        instance: object,
        shapes: Mapping[str, tuple[int, ...]],
        stored: Mapping[str, StoredType] | None = None,
    ) -> Conversion:
        """The tensors that the model's library makes of the folder.

        Args:
            instance: a model, or a part of one.
            shapes: of its whole tensors, by the names that the library has for them.
            stored: what takes the place of the folder's tensors; None: these.

        Raises:
            ValueError: it converts them by an operation that cg cannot follow.
        """
        if stored is None:
            stored = {
                name: StoredType(file.shapes[name], file.dtypes[name])
                for name, file in self.files.items()
            }
        model = library_model(instance)
        return as_stored(stored) if model is None else conversion_of(model, shapes, stored)

    def _stored(
        self,
        names: Mapping[str, tuple[str, ...]],
        conversion: Conversion,
        wanted: Mapping[str, torch.Tensor],
        actor: str,
    ) -> dict[str, StoredTensor]:
        stored, missing = {}, []
        for path, tensor in wanted.items():
            several = dict.fromkeys(
                n for name in names[path] for n in self._tied.get(name, (name,))
            )
            name = next((n for n in several if n in conversion.compositions), None)
            if name is None:
                missing.append(next(iter(names[path]), path))
                continue
            stored[path] = StoredTensor(conversion.compositions[name], self.files)
            self._compare(name, stored[path], tensor)
        if missing:
            raise ValueError(
                f"{self.folder} lacks tensors that {actor} has: {_few(missing)}; it has "
                f"{_few(list(self.files))}. A model of transformers reads its library's names if "
                "the actor has the model, or a part of it by cg.cut_layers; else give rename=. If "
                "the folder has a tied parameter under its other name, call check(model) of the "
                "weights"
            )
        return stored

    def _names(
        self, instance: object, wanted: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, tuple[str, ...]], Conversion]:
        """The names that the library has for tensors, by path, and what it makes of the folder."""
        model = library_model(instance)
        named: dict[int, tuple[str, ...]] = {}
        shapes: dict[str, tuple[int, ...]] = {}

        def add(name: str | None, tensor: torch.Tensor) -> None:
            if name is not None:
                named[id(tensor)] = (*named.get(id(tensor), ()), name)
                shapes[name] = tuple(tensor.shape)

        for path, tensor in model.state_dict(keep_vars=True).items() if model is not None else ():
            add(self._rename(path), tensor)
        others = {path: tensor for path, tensor in wanted.items() if id(tensor) not in named}
        prefix = self._prefix(others)
        for path, tensor in others.items():
            add(self._rename(path.removeprefix(prefix)), tensor)
        names = {path: named.get(id(tensor), ()) for path, tensor in wanted.items()}
        return names, self.conversion(model, shapes)

    def _prefix(self, paths: Iterable[str]) -> str:
        """The prefix of paths in front of names: the shortest with which a name is found."""
        for path in paths:
            parts = path.split(".")
            for start in range(len(parts)):
                name = self._rename(".".join(parts[start:]))
                if any(n in self.files for n in self._tied.get(name or "", (name,))):
                    return "".join(f"{part}." for part in parts[:start])
        return ""

    def _compare(self, name: str, stored: StoredTensor, tensor: torch.Tensor) -> None:
        for source, dtype in stored.dtypes.items():
            if not _converts(dtype, tensor.dtype):
                message = f"'{source}' is {dtype} in {self.folder}, and {tensor.dtype} here"
                if tensor.is_floating_point():  # scales, if there are any, would not be applied
                    message += (
                        "; a quantized model has to be written in float32, float16 or bfloat16"
                    )
                raise ValueError(message)
        shape = stored.composition.shape
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"'{name}' is {list(shape)} in {self.folder}, and {list(tensor.shape)} in the model"
            )

    def _open(self) -> list[WeightFile]:
        formats = (
            (f"{self._stem}.safetensors", TensorFile),
            (f"pytorch_{self._stem}.bin", PickledFile),
        )
        for file_name, opens in formats:
            index = self.folder / f"{file_name}.index.json"
            single = self.folder / file_name
            if index.exists():
                return self._open_several(index, opens)
            if single.exists():
                return [opens(single)]
        raise self._no_weights()

    def _open_several(self, index: Path, opens: Callable[[Path], WeightFile]) -> list[WeightFile]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map, which says where each tensor is")
        opened = {}
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).exists():
                raise ValueError(f"{index} names {file}, which is not in {self.folder}")
            opened[file] = opens(self.folder / file)
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
    own. Floating-point numbers are converted to the model's type. Tensors of a model of
    transformers are those that `from_pretrained` makes of the folder: its converters are applied.

    ```python
    weights = cg.pretrained(folder)
    weights.check(model)
    stage = Stage.on(cg.mesh(dp=2, tp=2), plan=plan, init=weights)(cuts, 0)
    ```

    Args:
        folder: with `model.safetensors`, or several such files and their index, or with
            `pytorch_model.bin` likewise.
        rename: what the folder calls a tensor of the model, by its name, or what the model's
            library does, as where adapters have changed it; names that differ by a prefix alone
            are found without it.
        stem: of the names of files.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: a file is damaged, or the index does not fit.
    """
    return Weights(Path(folder), stem, rename)


def weights_in(folder: str | os.PathLike[str] | None, stem: str, rename: Rename) -> Weights | None:
    """The weights of a folder; None if it has none, or there is no folder.

    Raises:
        ValueError: a file is damaged, or the index does not fit.
    """
    try:
        return None if folder is None else Weights(Path(folder), stem, rename)
    except FileNotFoundError:
        return None


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


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
