"""From the command line to the engine's options: what switches do there."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve import __main__ as command
from examples.serve import defaults, ranks
from examples.serve.defaults import Hardware, choose, measure
from examples.serve.features import Features, parse
from examples.serve.gpt import GptConfig
from examples.serve.opening import open_model
from examples.serve.options import add_arguments
from examples.serve.parts import Model
from examples.serve.settings import Options
from examples.serve.transports import loop_factory

from .fake_engine import TINY

CONFIG = Qwen2Config(num_hidden_layers=8, max_position_embeddings=2048)


@functools.cache
def model() -> Model:
    return open_model(CONFIG)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        yield


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def found(words: argparse.Namespace, features: Features) -> Options:
    """The engine's options on two ranks of a host with two cores each."""
    hardware = Hardware("cpu", 64 << 30, 2, has_triton=False)
    sizes = ranks.given_sizes(words, features)
    choice = choose(hardware, model(), torch.float32, sizes)
    return ranks.options(choice.options, words, features)


def test_sizes_that_are_given() -> None:
    own = found(given("--batch", "48", "--chunk", "100"), parse(""))
    assert own.batches == (1, 2, 4, 8, 16, 24, 32, 48)
    assert own.chunks == (32, 100)
    assert own.groups is None
    assert own.in_flight == 2
    assert own.late
    assert not found(given("--ahead"), parse("")).late
    assert found(given("--groups", "3"), parse("")).in_flight == 3
    assert found(given("--batch", "1"), parse("")).batches == (1,)
    few = given("--batch", "48", "--batches", "64", "24", "3", "--chunk", "100", "--chunks")
    own = found(few, parse(""))
    assert (own.batches, own.chunks) == ((3, 24, 48), (100,))
    assert found(few, parse("-variants")).batches == (48,)
    assert found(given("--layers", "7", "1"), parse("")).layers == (7, 1)
    assert found(given("--memory", "0.001"), parse("")).blocks < found(given(), parse("")).blocks


def test_a_draft() -> None:
    """A text's own, or a model, which takes room of the first rank."""
    none, own = found(given(), parse("")), found(given("--draft", "ngram"), parse(""))
    assert (none.draft_tokens, own.draft_tokens, own.draft) == (0, 4, None)
    words = given("--draft", "tiny-qwen2", "--draft-tokens", "2")
    options = found(words, parse(""))
    assert options.draft_tokens == 2
    assert isinstance(options.draft, Model)
    assert options.draft.vocabulary == 4096
    with pytest.raises(ValueError, match="--draft-tokens needs --draft"):
        found(given("--draft-tokens", "2"), parse(""))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft-tokens", "2"], "--draft-tokens needs --draft"),
        (["--draft", "/nowhere"], "there is no model /nowhere"),
        (["--draft", "ngram", "--draft-tokens", "0"], "0 is no number of at least 1"),
    ],
)
def test_a_draft_that_is_none(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert command.main(["--model", "random", "--port", "0", *words]) == command.BAD_USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "-0.5", "90", "nan", "much"])
def test_shares_of_memory_that_are_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given(f"--memory={share}")
    assert "argument --memory" in capsys.readouterr().err


def test_switches_of_the_engine() -> None:
    words = given("--context", "1024", "--batch", "8")
    largest = found(words, parse("-variants"))
    assert (largest.batches, largest.chunks, largest.widths) == ((8,), (512,), ())
    assert found(words, parse("-chunk")).chunks == (32, 128, 512, 1024)
    assert found(words, parse("-groups")).groups == 1
    assert not found(words, parse("-warm")).warm
    assert found(words, parse("-overlap,-capture")).passes == "-overlap,-capture"
    usual, large = found(words, parse("")), found(words, parse("+kv256,+clamp"))
    assert (large.block_size, large.clamp) == (256, True)
    assert (large.blocks - 1) * 256 == (usual.blocks - 1) * 16  # the same memory
    assert found(given("--blocks", "512"), parse("+kv256")).blocks == 32
    assert not large.debug_bounds
    assert found(words, parse("+debug_bounds")).debug_bounds
    with pytest.raises(ValueError, match="-chunk needs --context"):
        found(given(), parse("-chunk"))


def test_what_they_count() -> None:
    limits, usual = ranks.Limits(1, 4, 5, 16, 256, 30, 50, ()), ranks.Usual(512, 16)
    ranks.count(features := parse("-groups,-overlap,+kv256"), limits, given(), usual)
    changes = features.changes
    assert (changes["groups"], changes["overlap"], changes["capture"]) == (1, 1, 0)
    assert changes["kv256"] == 240
    ranks.count(features := parse(""), TINY, given(), usual)
    assert not any(features.changes.values())


def test_the_dtype_that_a_model_is_stored_in(tmp_path: Path) -> None:
    assert ranks.stored_dtype(GptConfig()) is torch.float32
    assert ranks.stored_dtype(CONFIG) is torch.float32
    assert ranks.stored_dtype(tmp_path) is torch.float32  # checkpoints of examples/train_gpt.py
    Qwen2Config(dtype="bfloat16").save_pretrained(tmp_path)
    assert ranks.stored_dtype(tmp_path) is torch.bfloat16


def test_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of two ranks in this process, each with half of the machine."""
    monkeypatch.setattr(defaults, "_free_host", lambda: 64 << 30)  # others change what is free
    model, choice, hardware = ranks.chosen(given("--model", "random"), parse(""))
    assert hardware == Hardware.least([measure(None, 2), hardware])
    assert model.context == 128
    assert choice.options.in_flight == 2
    assert len(choice.reasons) == 5


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
    assert found(passed, parse("")).prompt_tokens == 2048
    assert found(given(), parse("")).prompt_tokens is None
    words = command._parse(
        [*own, "--batches", "1", "2", "--chunks", "--layers", "5", "3", "--ahead"]
    )
    line = command.job(words, "random", parse(words.features))
    passed = ranks.parse([*line[line.index("examples.serve.ranks") + 1 :], "/tmp/socket"])
    assert passed.ahead
    assert (passed.batches, passed.chunks, passed.layers) == ([1, 2], [], [5, 3])
    assert str(passed.socket) == "/tmp/socket"


def test_the_job_gets_every_option_of_the_engine() -> None:
    lists = {"layers": "5 3", "batches": "1 2", "chunks": "", "dimensions": "", "lora": "a=b c=d"}
    words = {"dtype": "float16", "kv-dtype": "fp8", "fuse": "none", "task": "embed", "memory": ".5"}
    words |= {"pooling": "mean", "draft": "ngram", "profile": "DIR", "features": "-prefix,+uvloop"}
    sizes = (
        *("groups", "tp", "ep", "cp", "batch", "chunk", "prompt-tokens", "blocks", "block-size"),
        *("context", "draft-tokens"),
    )
    words |= {size: str(number) for number, size in enumerate(sizes, 1000)}
    own = ["--ahead", "--model=DIR", *(f"--{name}={word}" for name, word in words.items())]
    own += [word for name, text in lists.items() for word in (f"--{name}", *text.split())]
    parsed = given(*own)
    usual, changed = vars(given()), vars(parsed)
    assert [name for name in usual if changed[name] == usual[name]] == []
    line = command.job(command._parse(own), "RESOLVED", parse(""))
    passed = ranks.parse([*line[line.index("examples.serve.ranks") + 1 :], "/tmp/socket"])
    assert vars(passed) == changed | {"model": "RESOLVED", "socket": Path("/tmp/socket")}
