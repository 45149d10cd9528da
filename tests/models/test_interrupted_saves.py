"""A job that ends in the middle of a save: at every call that writes, nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .families import model_of, transformers
from .training import TrainedPart

pytestmark = pytest.mark.timeout(300)


class Killed(BaseException):
    """Stands for the end of the process: nobody handles it."""


@contextmanager
def dying_at(number: int) -> Iterator[list[str]]:
    """Inside the `with` block the process ends at its n-th call that changes files."""
    calls: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise Killed
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "posix_fallocate"),
            (np, "memmap"),
            (shutil, "copyfile"),
            (Path, "write_text"),
            (Path, "mkdir"),
            (Path, "open"),
        ):
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        yield calls


def test_nothing_is_lost_at_any_call(tmp_path: Path) -> None:
    model = model_of("Llama", 2)
    model.save_pretrained(tmp_path / "model")
    runs = tmp_path / "runs"
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model, 2)
        actors = [TrainedPart.on(index)(cuts, index) for index in range(2)]

        def save(step: int) -> None:
            name = runs / f"step-{step}"
            cg.save_checkpoint(name, actors, state={"step": step}, like=tmp_path / "model")

        save(1)
        with dying_at(0) as calls:
            save(2)
        shutil.rmtree(runs / "step-2")
        kinds, deaths = set(calls), 0
        assert {"fsync", "replace", "posix_fallocate", "memmap", "copyfile", "write_text"} <= kinds
        for number in range(1, len(calls) + 1):
            if calls[number - 1] == "memmap" and number % 8:
                continue  # one tensor is as another
            with pytest.raises(Killed), dying_at(number):
                save(2)
            deaths += 1
            newest = cg.newest_checkpoint(runs)
            is_named = calls[number - 1] == "fsync" and number == len(calls)
            assert newest is not None
            assert newest.name == ("step-2" if is_named else "step-1")
            assert cg.load_checkpoint(newest, actors)["step"] == (2 if is_named else 1)
        transformers.AutoModelForCausalLM.from_pretrained(runs / "step-1")
        shutil.rmtree(runs / "step-2", ignore_errors=True)
        save(2)
        assert sorted(each.name for each in runs.iterdir()) == ["step-1", "step-2"]
        assert deaths > 20


def test_a_full_disk_keeps_nothing_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, victim = tmp_path / "runs", tmp_path / "victim"
    runs.mkdir()
    victim.mkdir()
    (runs / ".step-1.partial").symlink_to(victim)
    reserve, calls = os.posix_fallocate, []

    def full(*where: int) -> None:
        calls.append(where)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*where)

    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model_of("Llama", 2), 2)
        actors = [TrainedPart.on(index)(cuts, index) for index in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed"):
                cg.save_checkpoint(runs / "step-1", actors, largest=20_000)
        assert not list(runs.iterdir())
        cg.save_checkpoint(runs / "step-1", actors)
    assert [each.name for each in runs.iterdir()] == ["step-1"]
    assert not list(victim.iterdir()), "a link at the folder's first name is not followed"
