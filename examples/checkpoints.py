"""Checkpoints of actors that do not depend on how the model was cut.

A checkpoint is a folder with a file for each actor, and a manifest that is written last. A
parameter's name is its name in the whole model, so any number of ranks can load a checkpoint of any
other number. A checkpoint appears under its final name only when it is complete: the folder is
written beside it and renamed, and `latest` is replaced in one step.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cg


def save(
    folder: Path,
    actors: list[cg.ActorHandle],
    compiled: cg.Compiled,
    step: int,
    extra: dict[str, Any],
) -> None:
    """Write the actors' parameters and optimizer states as `folder/step-N`.

    The manifest has the state of the compiled step's random numbers. Collective: every rank calls
    it, and writes the actors that it holds.
    """
    name = f"step-{step:06d}"
    partial = folder / f".{name}.partial"
    if cg.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    cg.barrier()
    for actor in actors:
        if actor.is_local:
            torch.save(_state(actor.local), partial / f"{actor.name}.pt")
    cg.barrier()
    if cg.rank() == 0:
        names = [actor.name for actor in actors]
        state = compiled.state_dict()
        manifest = {"step": step, "actors": names, "compiled": state, "extra": extra}
        (partial / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(folder / name, ignore_errors=True)
        partial.rename(folder / name)
        pointer = folder / ".latest.partial"
        pointer.write_text(name)
        os.replace(pointer, folder / "latest")
    cg.barrier()


def forget(folder: Path) -> None:
    """Let a new run begin: no later start of it goes on from a checkpoint of an older one.

    The older one's folders stay until the new run replaces them. Collective.
    """
    if cg.rank() == 0:
        (folder / "latest").unlink(missing_ok=True)
    cg.barrier()


def is_there(folder: Path) -> bool:
    """True if there is a checkpoint to go on from."""
    return (folder / "latest").exists()


def load(
    folder: Path, actors: list[cg.ActorHandle], compiled: cg.Compiled
) -> tuple[int, dict[str, Any]]:
    """Fill the actors from the newest checkpoint; returns its step and the `extra` of `save`.

    The compiled step goes on with the random numbers that it would have drawn next. Collective.

    Raises:
        FileNotFoundError: there is no complete checkpoint in `folder`.
        ValueError: a file of the checkpoint is damaged.
        KeyError: the checkpoint lacks a parameter that an actor has.
    """
    if not is_there(folder):
        raise FileNotFoundError(f"no checkpoint in {folder}: run without --resume first")
    path = folder / (folder / "latest").read_text()
    manifest = _read(path / "manifest.json", lambda file: json.loads(file.read_text()))
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for name in manifest["actors"]:
        part = _read(path / f"{name}.pt", _load_tensors)
        model |= part["model"]
        optimizer |= part["optimizer"]
    for actor in actors:
        if actor.is_local:
            _restore(actor.local, model, optimizer, manifest["step"])
    compiled.load_state_dict(manifest["compiled"])
    return manifest["step"], manifest["extra"]


def _read(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        names = sorted(path.name for path in file.parent.parent.glob("step-*"))
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {first_line}). To go on from another "
            f"checkpoint, write its name into {file.parent.parent / 'latest'}; there are "
            f"{', '.join(names)}"
        ) from error


def _load_tensors(file: Path) -> dict[str, Any]:
    # Mapped, since a rank needs a part of each file at most. On the host, since the rank that has
    # written it may have had a device that this one does not see.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _state(stage: Any) -> dict[str, Any]:
    """Parameters by name, and the optimizer's state of each by the same name."""
    state = stage.optimizer.state
    named = {name: state[p] for name, p in stage.named_parameters() if p in state}
    return {"model": stage.state_dict(), "optimizer": named}


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A copy on the parameter's device; AdamW keeps numbers, such as the step, on the host."""
    return value.to(parameter.device, copy=True) if value.shape else value.clone()


def _restore(
    stage: Any,
    model: dict[str, torch.Tensor],
    optimizer: dict[str, dict[str, Any]],
    step: int,
) -> None:
    names = list(stage.state_dict())
    missing = [name for name in names if name not in model]
    if missing:
        raise KeyError(f"the checkpoint has no {missing[0]}: was it of another model?")
    stage.load_state_dict({name: model[name] for name in names})
    for name, parameter in stage.named_parameters():
        if name in optimizer:
            stage.optimizer.state[parameter] = {
                key: _like(parameter, value) if isinstance(value, torch.Tensor) else value
                for key, value in optimizer[name].items()
            }
    stage.scheduler.last_epoch = step
    for group, base, scale in zip(
        stage.optimizer.param_groups,
        stage.scheduler.base_lrs,
        stage.scheduler.lr_lambdas,
        strict=True,
    ):
        group["lr"] = base * scale(step)
