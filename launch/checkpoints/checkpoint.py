"""Checkpoints of training: folders that the model's library opens, and that training resumes.

A checkpoint is a folder of weights (`weights.py`). In its folder `training` are the state of the
optimizers, a safetensors file, and `state.json`, with all that is no tensor. A checkpoint gets its
name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...tracer.record.actors.actors import ActorHandle
from ...tracer.values.actor_state import StateTensor, collect
from ..api.compiled import Compiled
from ..models.part import ModelPart
from ..world.world import world
from .actor_files import check_optimizers, fill_optimizers
from .held import NameOf, SavedPiece, has_optimizers, optimizer_pieces, pieces
from .stored_pieces import PartNames, stored_pieces, stored_tensors
from .stored_tensor import StoredTensor
from .tensor_files import TensorFile, replace, sync, table_of, write
from .together import on_rank_0, together
from .trainers import TrainerState, check_trainers, put_trainers, trainers_of
from .weights import Rename, Weights, dtype_of, index_of, read_json, shards, weights_in

_TRAINING, _OPTIMIZERS, _STATE = "training", "optimizers.safetensors", "state.json"
_NUMBERED = re.compile(r"step-(\d+)")
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")


def save_checkpoint(
    folder: str | os.PathLike[str],
    actors: Sequence[ActorHandle],
    *,
    compiled: Compiled | None = None,
    state: Mapping[str, Any] | None = None,
    like: str | os.PathLike[str] | None = None,
    files: Mapping[str, str] | None = None,
    rename: Rename = str,
    stem: str = "model",
    largest: int = 5_000_000_000,
    dry_run: bool = False,
) -> None:
    """Write the parts of a cut model, and the state of its training, as a folder; collective.

    The folder is one of weights, which `from_pretrained` opens, whatever meshes the actors are on.
    It appears when it is complete: a job that ends before leaves no folder of that name. All ranks
    see one file system.

    Args:
        folder: its name; `step-000100`, say, so that `newest_checkpoint` finds it.
        actors: each has a part of the model (`Cuts.part`), and all parts are given. Their
            optimizers and LR schedulers have one kind of options.
        compiled: the step, for the random numbers that it would draw next.
        state: what else the training goes on from, such as the position in its data, for JSON; the
            same on all ranks.
        like: a folder of the model, whose other files are copied: the configuration and the
            tokenizer. If it has weights, theirs are the names and shapes that are written.
        files: other files by name, with their text.
        rename: what the model's library calls a tensor of the model; None for what is not written.
        stem: of the names of files with weights.
        largest: bytes in one of them.
        dry_run: write nothing, but refuse all that would be refused, before the first step. What
            optimizers make in their first update is not there yet.

    Raises:
        ValueError: an actor has no part of a model, or tensors besides; or optimizers differ, or
            have state that `cg.save` refuses; or `state` has no form in JSON.
        OSError: a rank could not write, or the folder is there already.
    """
    path = Path(folder)
    partial = path.with_name(f".{path.name}.partial")
    trainers = trainers_of(actors)
    weights, optimizers = together(
        lambda: _pieces(actors, rename, weights_in(like, stem, rename)), "name its tensors"
    )
    tables = table_of(weights), table_of(optimizers)
    parts = list(shards(tables[0], stem, largest))
    texts = dict(files or {})
    if len(parts) > 1:
        texts[f"{stem}.safetensors.index.json"] = json.dumps(index_of(parts), indent=1)
    texts[f"{_TRAINING}/{_STATE}"] = together(
        lambda: _state_text(trainers, compiled, state), "write its state"
    )
    on_rank_0(lambda: _refuse_present(path))
    if dry_run:
        return
    on_rank_0(lambda: _make_empty(partial))
    try:
        for part in parts:
            write(partial / part.file, part.table, weights)
        write(partial / _TRAINING / _OPTIMIZERS, tables[1], optimizers)
        on_rank_0(lambda: _finish(partial, path, texts, like, dtype_of(tables[0])))
    except OSError:
        if world().rank == 0:  # the next save may need the space
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(
    folder: str | os.PathLike[str],
    actors: Sequence[ActorHandle],
    *,
    compiled: Compiled | None = None,
    rename: Rename = str,
    stem: str = "model",
) -> dict[str, Any]:
    """Go on from a checkpoint that `save_checkpoint` has written; collective.

    The ranks, the meshes and the cuts of the model may be others than those that have written it.
    All that is to be read is looked at on all ranks before anything is filled.

    Args:
        folder: of the checkpoint.
        actors, compiled, rename, stem: as for `save_checkpoint`.

    Returns:
        Its `state`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        KeyError: it lacks a tensor that an actor has.
        ValueError: it is damaged, or of another model or other optimizers: a tensor is surplus, or
            of another shape or type, or has no optimizer here that takes it. Nothing has been
            changed.
    """
    path = Path(folder)
    read = together(lambda: _OpenCheckpoint.of(path, actors, rename, stem), f"read {path}")
    surplus = read.names.difference(*world().allgather(read.taken))
    if surplus:
        raise ValueError(
            f"{path} has tensors that no actor has, such as '{min(surplus)}': is it of another "
            "model?"
        )
    optimizer_names = read.kept.union(*world().allgather(read.kept))
    untrained = read.untrained.union(*world().allgather(read.untrained))
    leftover = {name for name in read.optimizers.shapes if name.rpartition(".")[0] not in untrained}
    if leftover - optimizer_names:
        raise ValueError(
            f"{path} has '{min(leftover - optimizer_names)}' of an optimizer, and no optimizer "
            "trains that parameter here; give it to one in the constructor, or load into actors "
            "without any"
        )
    if compiled is not None and read.compiled is not None:
        compiled.load_state_dict(read.compiled)
    read.fill(actors)
    return read.state


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint `step-N` of the largest N in a folder; None if there is none.

    All ranks get what rank 0 sees. Collective.

    Args:
        folder: the one in which `save_checkpoint` makes folders; it need not be there.
    """
    newest: tuple[int, str] | None = None
    if world().rank == 0 and Path(folder).is_dir():
        matches = ((_NUMBERED.fullmatch(entry.name), entry) for entry in Path(folder).iterdir())
        newest = max(((int(m[1]), str(entry)) for m, entry in matches if m), default=None)
    newest = world().broadcast(newest, 0)
    return None if newest is None else Path(newest[1])


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint that has been checked as a whole, and is to be read.

    Attributes:
        optimizers: the tensors that they keep.
        parts: the actors' parts of the model.
        sources: for each actor the tensors of the files that it reads, by name.
        names: of the weights.
        taken: those that this process's ranks have.
        kept: the names of the tensors that their optimizers take.
        untrained: of weights, those of actors without optimizers.
        trainers, compiled, state: as they were saved.
    """

    optimizers: TensorFile
    parts: list[_NamedPart]
    sources: list[Mapping[str, StoredTensor]]
    names: frozenset[str]
    taken: frozenset[str]
    kept: frozenset[str]
    untrained: frozenset[str]
    trainers: TrainerState
    compiled: dict[str, int] | None
    state: dict[str, Any]

    @staticmethod
    def of(path: Path, actors: Sequence[ActorHandle], rename: Rename, stem: str) -> _OpenCheckpoint:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        weights = Weights(path, stem, rename)
        optimizers = TensorFile(path / _TRAINING / _OPTIMIZERS)
        saved = read_json(path / _TRAINING / _STATE)
        try:
            trainers = TrainerState.of_json(saved["trainers"])
            compiled, state = saved["compiled"], saved["state"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / _TRAINING / _STATE} is damaged: {error}") from error
        check_trainers(actors, trainers)
        parts = [_part_of(actor, rename) for actor in actors]
        sources: list[Mapping[str, StoredTensor]] = [
            stored_tensors(pieces(p.actor, p.name_of), p.names, weights, p.actor.name)
            for p in parts
        ]
        taken = {name for own in sources for tensor in own.values() for name in tensor.dtypes}
        optimizer_names: set[str] = set()
        untrained: set[str] = set()
        for part, own in zip(parts, sources, strict=True):
            untrained |= set() if has_optimizers(part.actor) else own.keys()
            optimizer_names |= check_optimizers(optimizers, part.actor, part.name_of)
        return _OpenCheckpoint(
            optimizers,
            parts,
            sources,
            frozenset(weights.files),
            frozenset(taken),
            frozenset(optimizer_names),
            frozenset(untrained),
            trainers,
            compiled,
            state,
        )

    def fill(self, actors: Sequence[ActorHandle]) -> None:
        put_trainers(actors, self.trainers)
        for part, sources in zip(self.parts, self.sources, strict=True):
            for piece in pieces(part.actor, part.name_of):
                value = sources[piece.name].read(piece.region, piece.tensor.dtype)
                piece.tensor.data.copy_(value)
            fill_optimizers(self.optimizers, part.actor, part.name_of)


def _pieces(
    actors: Sequence[ActorHandle], rename: Rename, like: Weights | None
) -> tuple[list[SavedPiece], list[SavedPiece]]:
    """The pieces of weights, and of what optimizers keep, on the ranks of this process."""
    weights: list[SavedPiece] = []
    optimizers: list[SavedPiece] = []
    for actor in actors:
        part = _part_of(actor, rename)
        own_pieces = list(pieces(actor, part.name_of))
        weights += own_pieces if like is None else stored_pieces(own_pieces, part.names, like)
        optimizers += optimizer_pieces(actor, part.name_of)
    return weights, optimizers


@dataclass(frozen=True)
class _NamedPart:
    """An actor's part of a model.

    Attributes:
        actor: has it.
        names: those of its part of a model.
        name_of: names the actor's tensors; a tied one by its first name.
    """

    actor: ActorHandle
    names: PartNames
    name_of: NameOf


def _part_of(actor: ActorHandle, rename: Rename) -> _NamedPart:
    """An actor's part of a model, with names for its tensors.

    Raises:
        ValueError: the actor has no part of a model, or has tensors besides.
    """
    names: dict[int, str | None] = {}
    part: ModelPart | None = None
    for instance in actor.instances.values():
        modules = instance.named_modules() if isinstance(instance, torch.nn.Module) else ()
        parts = ((path, part) for path, part in modules if isinstance(part, ModelPart))
        path, part = next(parts, ("", None))
        if part is None:
            raise ValueError(f"{actor.name} has no part of a model, as cg.cut_layers makes them")
        state = collect(instance).tensors
        own_names = _names_in(path, part, state, rename)
        for state_tensor in state:
            if id(state_tensor.tensor) not in own_names:
                raise ValueError(
                    f"'{state_tensor.path}' of {actor.name} is no tensor of the model, so a folder "
                    "of the model's weights has no place for it; save it by cg.save"
                )
        names |= own_names
    part_names = PartNames(part, {} if part is None else _tied_in(part, rename))
    return _NamedPart(actor, part_names, lambda state: names[id(state.tensor)])


def _names_in(
    path: str, part: ModelPart, state: Sequence[StateTensor], rename: Rename
) -> dict[int, str | None]:
    """The names of a part's tensors by their identity; None for what the model makes anew.

    That is what `state_dict` leaves out: buffers that are not persistent, and tensors that are
    plain attributes of the model's modules, such as a table of positions.
    """
    names: dict[int, str | None] = {id(tensor): None for tensor in part.buffers()}
    inside = f"{path}.model.".removeprefix(".")
    names |= {
        id(state_tensor.tensor): None
        for state_tensor in state
        if state_tensor.path.startswith(inside)
    }
    state_dict = part.model.state_dict(keep_vars=True)
    return names | {id(tensor): rename(name) for name, tensor in reversed(state_dict.items())}


def _tied_in(part: ModelPart, rename: Rename) -> dict[str, tuple[str, ...]]:
    """All names of a part's tensors by the first of them."""
    names: dict[int, tuple[str, ...]] = {}
    for path, tensor in part.model.state_dict(keep_vars=True).items():
        name = rename(path)
        if name is not None:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return {several[0]: several for several in names.values()}


def _state_text(
    trainers: TrainerState, compiled: Compiled | None, state: Mapping[str, Any] | None
) -> str:
    content = {
        "trainers": trainers.as_json(),
        "compiled": None if compiled is None else compiled.state_dict(),
        "state": dict(state or {}),
    }
    try:
        return json.dumps(content, indent=1)
    except TypeError as error:
        raise ValueError(
            f"the state of a checkpoint is JSON, and holds no such thing: {error}"
        ) from error


def _refuse_present(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} is there already; save under another name, or remove it")


def _make_empty(partial: Path) -> None:
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)  # as a job has left it
    partial.unlink(missing_ok=True)  # of a symbolic link that is the link itself
    partial.mkdir(parents=True)
    (partial / _TRAINING).mkdir()


def _finish(
    partial: Path,
    path: Path,
    texts: Mapping[str, str],
    like: str | os.PathLike[str] | None,
    dtype: str | None,
) -> None:
    """Write everything that is no tensor, and give the folder its name."""
    for file in sorted(Path(like).iterdir()) if like is not None else ():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith("."):
            shutil.copyfile(file, partial / file.name)
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    config = partial / "config.json"
    if dtype is not None and config.exists():
        settings = read_json(config)
        settings.pop("torch_dtype", None)  # its older name
        config.write_text(json.dumps(settings | {"dtype": dtype}, indent=2), encoding="utf-8")
    for file in partial.rglob("*"):
        sync(file)
    sync(partial)
    replace(partial, path)
