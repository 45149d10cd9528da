"""From the command line to the engine's options: what switches do there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import pytest

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve import __main__ as command
from examples.serve import ranks
from examples.serve.features import parse
from examples.serve.options import add_arguments
from examples.serve.transports import loop_factory

from .fake_engine import TINY


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        yield


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_buckets() -> None:
    found = ranks.options(given("--batch", "48", "--chunk", "100"), parse(""))
    assert found.batches == (1, 2, 4, 8, 16, 24, 32, 48)
    assert found.chunks == (32, 100)
    assert found.groups is None
    assert found.in_flight == 2
    assert ranks.options(given("--groups", "3"), parse("")).in_flight == 3
    assert ranks.options(given("--batch", "1"), parse("")).batches == (1,)
    few = given("--batch", "48", "--batches", "64", "24", "3", "--chunk", "100", "--chunks")
    found = ranks.options(few, parse(""))
    assert (found.batches, found.chunks) == ((3, 24, 48), (100,))
    assert ranks.options(few, parse("-variants")).batches == (48,)


def test_sequences_are_no_longer_than_blocks_hold() -> None:
    small = ("--blocks", "5", "--block-size", "4")
    assert ranks.options(given(*small), parse("")).context == 16
    assert ranks.options(given(*small, "--context", "12"), parse("")).context == 12
    with pytest.raises(ValueError, match="4 blocks of 4 tokens hold no sequence of 17: give more"):
        ranks.options(given(*small, "--context", "17"), parse(""))


def test_switches_of_the_engine() -> None:
    words = given("--context", "1024", "--batch", "8")
    largest = ranks.options(words, parse("-variants"))
    assert (largest.batches, largest.chunks, largest.widths) == ((8,), (512,), ())
    assert ranks.options(words, parse("-chunk")).chunks == (32, 128, 512, 1024)
    assert ranks.options(words, parse("-groups")).groups == 1
    assert not ranks.options(words, parse("-warm")).warm
    assert ranks.options(words, parse("-overlap,-capture")).passes == "-overlap,-capture"
    large = ranks.options(words, parse("+kv256,+clamp"))
    assert (large.blocks, large.block_size, large.clamp) == (32, 256, True)
    assert not large.debug_bounds
    assert ranks.options(words, parse("+debug_bounds")).debug_bounds
    with pytest.raises(ValueError, match="-chunk needs --context"):
        ranks.options(given(), parse("-chunk"))


def test_what_they_count() -> None:
    limits = ranks.Limits(1, 4, 5, 16, 256, 30, 50, ())
    ranks.count(features := parse("-groups,-overlap,+kv256"), limits, given())
    changes = features.changes
    assert (changes["groups"], changes["overlap"], changes["capture"]) == (1, 1, 0)
    assert changes["kv256"] == 240
    ranks.count(features := parse(""), TINY, given())
    assert not any(features.changes.values())


def test_a_loop_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory(parse("")) is None
    with pytest.raises(ValueError, match="pip install uvloop"):
        loop_factory(parse("+uvloop"))


def test_the_command_of_the_job() -> None:
    own = ["-n", "3", "--batch", "4", "--prompt-tokens", "2048", "--features=-affinity,-thr_cap"]
    words = command._parse(own)
    line = command.job(words, "random", parse(words.features))
    assert line[1:7] == ["-m", "cg.launch", "-n", "3", "--no-thread-cap", "--no-affinity"]
    start = line.index("examples.serve.ranks") + 1
    passed = ranks.parse([*line[start:], "/tmp/socket"])
    assert (passed.model, passed.batch, passed.features) == ("random", 4, "-affinity,-thr_cap")
    assert ranks.options(passed, parse("")).prompt_tokens == 2048
    assert ranks.options(given(), parse("")).prompt_tokens is None
    words = command._parse([*own, "--batches", "1", "2", "--chunks"])
    line = command.job(words, "random", parse(words.features))
    passed = ranks.parse([*line[line.index("examples.serve.ranks") + 1 :], "/tmp/socket"])
    assert (passed.batches, passed.chunks, str(passed.socket)) == ([1, 2], [], "/tmp/socket")
    assert str(passed.socket) == "/tmp/socket"
