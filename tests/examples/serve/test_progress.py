"""Lines of the log while something takes long, and the results of work that is started in parts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.progress import said
from examples.serve.requests import GREEDY
from examples.serve.results import Parts
from examples.serve.stage_graphs import Zeros
from examples.serve.work import Chunk, Prefill

from .fake_engine import FakeResult


class Lines(logging.Handler):
    """Keeps lines, and says when there are so many."""

    def __init__(self, enough: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.there, self._enough = threading.Event(), enough

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) >= self._enough:
            self.there.set()


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, handler = logging.getLogger("serve"), Lines(3)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def test_what_takes_long_is_said_again(lines: Lines) -> None:
    with said("compiling it", every=0.01):
        assert lines.there.wait(60)
    assert lines.lines[0] == "compiling it"
    assert {line.partition(", for")[0] for line in lines.lines[1:]} == {"still compiling it"}


def test_other_ranks_say_nothing(lines: Lines) -> None:
    with said("compiling it", here=False, every=0.01):
        pass
    assert not lines.lines


def test_an_error_ends_the_lines(lines: Lines) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), said("compiling it", every=0.01):
        raise KeyError
    assert threading.active_count() == before


def part(token: int) -> FakeResult:
    chunk = Chunk((token,), 0, (1,), True, GREEDY)
    return FakeResult(Prefill((chunk,)))


def test_parts_are_done_when_all_are() -> None:
    first, second = part(1), part(2)
    whole, calls = Parts([first, second]), []
    whole.when_done(lambda: calls.append(1))
    second.tokens = [7]
    for call in second.calls:
        call()
    assert not whole.done()
    assert not calls
    first.tokens = [5]
    for call in first.calls:
        call()
    assert whole.done()
    assert calls == [1]
    assert whole.result() == [5, 7]
    assert whole.scores() == []


def test_a_part_that_fails_fails_the_whole() -> None:
    first, second = part(1), part(2)
    first.tokens, second.error = [5], ValueError("no")
    assert Parts([first, second]).done()
    with pytest.raises(ValueError, match="no"):
        Parts([first, second]).result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_have_the_size_of_a_region(dtype: torch.dtype) -> None:
    """Of two runs of indices, and of one."""
    source = Zeros(torch.device("cpu"))
    assert set(source.tensors(None, {"pool0": torch.empty(4, device="meta")}, "stage")) == {"pool0"}
    found = source.read((((0, 2), (6, 8)), ((1, 4),)), dtype)
    assert (tuple(found.shape), found.dtype) == ((4, 3), dtype)
    assert not found.any()
    found[3, 2] = 2.5
    assert found.sum() == 2.5
