"""Public names: what users see of steps and errors in a notebook or a traceback."""

from __future__ import annotations

import configparser
import pickle
from pathlib import Path

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

ERRORS = [
    name
    for name in cg.__all__
    if isinstance(getattr(cg, name), type) and issubclass(getattr(cg, name), BaseException)
]


@pytest.mark.parametrize("name", ERRORS)
def test_a_traceback_shows_an_error_by_its_public_name(name: str) -> None:
    error = getattr(cg, name)
    assert f"{error.__module__}.{error.__qualname__}" == f"cg.{name}"


def test_errors_pickle_by_their_public_names() -> None:
    error = pickle.loads(pickle.dumps(cg.TraceError("a reason", remedy="a remedy")))
    assert type(error) is cg.TraceError
    assert error.remedy == "a remedy"


def test_the_version_is_that_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    assert cg.__version__ == setup["metadata"]["version"]


def test_steps_tell_what_they_are() -> None:
    @cg.trace
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def driven(x: torch.Tensor) -> torch.Tensor:
        return x + x

    small, large = torch.zeros(1), torch.zeros(2)
    with use_world(VirtualWorld(2)):
        assert repr(double) == "<cg.Step double: not compiled>"
        double(small)
        assert repr(double) == "<cg.Step double: compiled for 1 signature>"
        double(large)
        assert repr(double) == "<cg.Step double: compiled for 2 signatures>"
        lowered = double.lower(small)
        assert repr(lowered) == "<cg.Lowered double: traced for 1 signature, 2 ranks>"
        compiled = lowered.compile()
        ops = sum(len(program.ops) for program in compiled.module.programs)
        assert repr(compiled) == f"<cg.Compiled double: {ops} ops on 2 ranks>"
        graph = driven.lower_many([small, large]).compile()
        assert "the first of 2 signatures, driven from rank 0>" in repr(graph)
