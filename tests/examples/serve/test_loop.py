"""The loop on rank 0 and the frames: budgets, bounds, merging, and what is no frame."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import pickle
import sys
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve import ranks, wire
from examples.serve import serving_loop as loops
from examples.serve.features import Features, parse
from examples.serve.front import job as job_module
from examples.serve.front.job import EngineJob
from examples.serve.front.metrics import Metrics
from examples.serve.front.reply import Reply
from examples.serve.loop import EngineLoop
from examples.serve.requests import LOGPROBS, End, Events, Limits, Request, Sampling, Scores
from examples.serve.serving_loop import BACKLOG, BUDGET
from examples.serve.transports import unpickle
from examples.serve.wire import Kind, Link

from .fake_engine import ROOMY, FakeEngine, reference

IDS = st.integers(0, 2**32 - 1)
REQUESTS = st.builds(
    Request,
    id=IDS,
    prompt=st.lists(IDS, min_size=1, max_size=50).map(tuple),
    max_tokens=IDS,
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 2, width=32),
        top_k=IDS,
        top_p=st.floats(0, 1, width=32),
        seed=st.integers(0, 2**63 - 1),
        logprobs=st.none() | st.integers(0, LOGPROBS),
    ),
    ignore_eos=st.booleans(),
    salt=st.binary(max_size=100),
    adapter=st.integers(0, 65535),
)
LOGS = st.floats(max_value=0, allow_nan=False)
SCORES = st.builds(
    Scores, drawn=LOGS, likeliest=st.lists(st.tuples(IDS, LOGS), max_size=3).map(tuple)
)


@given(st.lists(REQUESTS, max_size=5))
def test_requests_cross(requests: list[Request]) -> None:
    found = [each for part in wire.pack_requests(requests) for each in wire.unpack_requests(part)]
    assert found == requests


@given(st.lists(REQUESTS, min_size=1, max_size=2), st.data())
def test_requests_that_are_cut_off(requests: list[Request], data: st.DataObject) -> None:
    """They are refused, unless the cut is between two."""
    (whole,) = wire.pack_requests(requests)
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        found = wire.unpack_requests(whole[:cut])
    except wire.WireError:
        return
    assert found == requests[: len(found)]
    assert len(found) < len(requests)


@given(
    st.lists(IDS),
    st.lists(st.tuples(IDS, IDS)),
    st.lists(st.builds(End, id=IDS, reason=st.text(), count=IDS, message=st.text())),
    st.lists(st.tuples(IDS, SCORES)),
    st.booleans(),
)
def test_events_cross(
    started: list[int],
    pairs: list[tuple[int, int]],
    ends: list[End],
    scores: list[tuple[int, Scores]],
    is_flat: bool,
) -> None:
    flat = array("I", [number for pair in pairs for number in pair])
    events = Events(array("I", started), flat, ends, scores)
    kind = Kind.EVENTS if is_flat else Kind.OBJECTS
    assert wire.unpack_events(kind, wire.pack_events(events, is_flat)) == events
    assert wire.events_of(*unpickle(pickle.dumps(wire.plain(events)))) == events


def test_many_requests_are_several_frames() -> None:
    requests = [Request(i, tuple(range(1000)), 1) for i in range(1000)]
    parts = list(wire.pack_requests(requests))
    assert len(parts) == 4
    assert max(map(len, parts)) < 2 * wire.CUT


class Front:
    """The other end of the loop's socket."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, bytes]] = []
        self.came = asyncio.Event()
        self.link = Link(self._on_frame, lambda link: self.came.set())
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}

    def _on_frame(self, link: Link, kind: Kind, payload: bytes) -> None:
        self.frames.append((kind, payload))
        if kind is Kind.EVENTS:
            events = wire.unpack_events(kind, payload)
            for id_, token in zip(events.pairs[::2], events.pairs[1::2], strict=True):
                self.tokens.setdefault(id_, []).append(token)
            self.ends.update({end.id: end for end in events.ends})
        self.came.set()

    def add(self, *requests: Request) -> None:
        for payload in wire.pack_requests(requests):
            self.link.send(Kind.ADD, payload)

    async def until(self, right: Callable[[], bool]) -> None:
        while not right():
            self.came.clear()
            await self.came.wait()


def run(
    folder: Path,
    story: Callable[[Front, EngineLoop], Awaitable[None]],
    features: str = "",
    delay: float | None = 0.0,
    limits: Limits = ROOMY,
    **options: int,
) -> EngineLoop:
    """Let a loop and a front talk, until the front has told its story."""
    engine = FakeEngine(limits, delay)
    loops: list[EngineLoop] = []

    async def main() -> None:
        front = Front()
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: front.link, str(folder / "engine")
        )
        loop = EngineLoop(engine, parse(features), **options)
        loops.append(loop)
        running = asyncio.ensure_future(loop.run(folder / "engine"))
        await front.until(lambda: bool(front.frames))
        try:
            await story(front, loop)
        finally:
            front.link.close()
            server.close()
        await running

    asyncio.run(main())
    return loops[0]


def test_a_conversation(tmp_path: Path) -> None:
    requests = [Request(i, (i, 2, 3), 5 + i) for i in range(1, 30)]

    async def story(front: Front, loop: EngineLoop) -> None:
        kind, payload = front.frames[0]
        assert kind is Kind.HELLO
        assert wire.unpack_hello(payload) == (ROOMY, os.getpid())
        front.add(*requests)
        await front.until(lambda: len(front.ends) == len(requests))
        for each in requests:
            assert front.tokens[each.id] == reference(each.prompt, each.max_tokens, ROOMY)
            assert front.ends[each.id] == End(each.id, "length", each.max_tokens)

    loop = run(tmp_path, story)
    assert loop.scheduler.is_idle
    assert loop.scheduler.blocks.used == 0


def test_the_log_says_how_many_proposals_were_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, for the next line is due ten seconds later."""
    monkeypatch.setattr(loops, "BEAT", 0.0)

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(Request(1, (1, 2, 3), 200, ignore_eos=True))
        await front.until(lambda: bool(front.ends))

    limits = replace(ROOMY, draft_tokens=4, has_draft=True)
    with caplog.at_level(logging.INFO, "serve"):
        loop = run(tmp_path, story, limits=limits)
    assert loop.scheduler.speculation.accepted_tokens > 20
    lines = [line for line in caplog.messages if "proposed tokens were right" in line]
    assert len(lines) == 1


@pytest.mark.parametrize("number", [1, 3, 12])
def test_what_is_cancelled_is_free_before_another_step(tmp_path: Path, number: int) -> None:
    """Whether it decodes, is in prefill, or waits: it is in none of the executions behind that."""

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(*(Request(i, (i,) * 40, 100) for i in range(1, number + 1)))
        engine = loop.engine
        assert isinstance(engine, FakeEngine)
        while engine.works < 6 or loop.scheduler.running < min(number, 4):
            if engine.queue:
                engine.run_one()
            await asyncio.sleep(0)
        in_flight = len(engine.queue)
        front.link.send(Kind.CANCEL, wire.pack_ids(range(1, number + 1)))
        while not loop.scheduler.is_idle:
            await asyncio.sleep(0)
        assert loop.scheduler.blocks.used == 0
        assert len(engine.queue) <= in_flight + 2  # a turn may have come before the frame
        while engine.queue:
            engine.run_one()
        await asyncio.sleep(0)
        assert not front.ends

    run(tmp_path, story, delay=None)


@pytest.mark.parametrize("features", ["", "-cmd_budget"])
def test_a_burst_of_commands_does_not_hold_up_a_step(tmp_path: Path, features: str) -> None:
    number = 3 * BUDGET

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(Request(1, (1,), 3))
        while not loop.scheduler._all:
            await asyncio.sleep(0)
        front.add(*(Request(i, (1,), 1) for i in range(2, 2 + number)))
        while max(loop.scheduler._all) == 1:
            await asyncio.sleep(0)
        taken = max(loop.scheduler._all) - 1
        assert taken == (number if features else BUDGET)
        assert (loop.features.changes["cmd_budget"] > 0) == bool(features)

    run(tmp_path, story, features, delay=None)


def test_commands_are_not_kept_without_bound(tmp_path: Path) -> None:
    """Past some, the socket is not read, and the front learns that its link is full."""

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(Request(1, (1,), 3))
        while loop.scheduler.is_idle:
            await asyncio.sleep(0)
        number = 1
        while not front.link.is_full:
            front.link.send(Kind.CANCEL, array("I", [9] * 1000).tobytes())
            number += 1
            if number % 100 == 0:
                await asyncio.sleep(0)
            assert number < 100_000, "all is taken"
        assert len(loop._commands) < BACKLOG + 100_000
        await front.until(lambda: not front.link.is_full or bool(loop._commands))

    run(tmp_path, story, delay=None)


def test_long_chunks_are_counted(tmp_path: Path) -> None:
    """With `-chunk` the engine has longer ones than it usually has."""

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(Request(1, (1,) * 20, 3), Request(2, (2,) * 7, 3))
        await front.until(lambda: len(front.ends) == 2)

    assert run(tmp_path, story, "-chunk", usual_chunk=8).features.changes["chunk"] == 12


def test_an_idle_engine_is_improved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there has been no work for a while, and as long as there is none."""
    monkeypatch.setattr(loops, "QUIET", 0.02)

    async def story(front: Front, loop: EngineLoop) -> None:
        assert isinstance(loop.engine, FakeEngine)
        loop.engine.to_improve = 2
        front.add(Request(1, (1,), 3))
        await front.until(lambda: len(front.ends) == 1)
        await front.until(
            lambda: isinstance(loop.engine, FakeEngine) and not loop.engine.to_improve
        )
        front.add(Request(2, (2,), 3))
        await front.until(lambda: len(front.ends) == 2)

    run(tmp_path, story)


def test_an_engine_is_idle_after_as_long_as_its_longest_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So requests wait for slices no longer than they leave the engine alone."""
    monkeypatch.setattr(loops, "QUIET", 0.0)

    async def story(front: Front, loop: EngineLoop) -> None:
        engine = loop.engine
        assert isinstance(engine, FakeEngine)
        engine.longest_slice, engine.to_improve = 1e9, 1
        front.add(Request(1, (1,), 3))
        await front.until(lambda: len(front.ends) == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.to_improve == 1
        engine.longest_slice = 0.0
        front.add(Request(2, (2,), 3))
        await front.until(lambda: not engine.to_improve)

    run(tmp_path, story)


def test_idle_time_counts_from_the_end_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from its submission; and one long slice does not make an engine wait for ever."""
    clock = [0.0]
    monkeypatch.setattr(loops, "monotonic", lambda: clock[0])

    async def story(front: Front, loop: EngineLoop) -> None:
        engine = loop.engine
        assert isinstance(engine, FakeEngine)
        engine.longest_slice = 5.0
        front.add(Request(1, (1,), 1))
        while not engine.queue:
            await asyncio.sleep(0)
        clock[0], engine.longest_slice = 100.0, 1e9
        engine.run_one()
        await front.until(lambda: len(front.ends) == 1)
        assert loop._quiet_at == 100.0 + loops.LONGEST_QUIET

    run(tmp_path, story, delay=None)


def test_requests_that_come_meanwhile_go_ahead_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are still in the socket when the engine has been improved, so it looks idle."""
    monkeypatch.setattr(loops, "QUIET", 0.2)
    ended: list[int] = []

    async def story(front: Front, loop: EngineLoop) -> None:
        assert isinstance(loop.engine, FakeEngine)
        loop.engine.to_improve = 3

        def ask() -> None:
            ended.append(len(front.ends))
            front.add(Request(len(ended), (1,), 3))

        loop.engine.before = ask
        await front.until(lambda: len(front.ends) == 3)

    run(tmp_path, story)
    assert ended == [0, 1, 2]


def tokens_are_sent(loop: EngineLoop) -> None:
    """Clients do not wait for tokens that are there."""
    assert not loop._unsent
    assert not loop.scheduler.take_events()


def test_a_busy_engine_is_improved_between_executions(tmp_path: Path) -> None:
    """With nothing in flight, and then the requests go on."""

    async def story(front: Front, loop: EngineLoop) -> None:
        assert isinstance(loop.engine, FakeEngine)
        front.add(*(Request(i, (i,), 100) for i in range(1, 6)))
        while not loop.engine.works:
            await asyncio.sleep(0)
        loop.engine.to_improve = loop.engine.urgent = 3
        loop.engine.before = lambda: tokens_are_sent(loop)
        await front.until(lambda: len(front.ends) == 5)
        assert loop.engine.to_improve == 0
        for i in range(1, 6):
            assert front.tokens[i] == reference((i,), 100, ROOMY)

    run(tmp_path, story)


def test_an_engine_wakes_the_loop_when_kernels_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for anything then. Requests are served until then, and behind it."""
    monkeypatch.setattr(loops, "QUIET", 0.0)

    async def story(front: Front, loop: EngineLoop) -> None:
        engine = loop.engine
        assert isinstance(engine, FakeEngine)
        engine.is_ready, engine.to_improve = False, 1
        front.add(Request(1, (1,), 3))
        await front.until(lambda: len(front.ends) == 1)
        assert engine.to_improve == 1
        engine.is_ready = True
        await asyncio.to_thread(engine.ready)
        while engine.to_improve:
            await asyncio.sleep(0)
        front.add(Request(2, (2,), 3))
        await front.until(lambda: len(front.ends) == 2)

    run(tmp_path, story)


@pytest.mark.parametrize(("features", "times"), [("", 2), ("-gc_freeze", 0)])
def test_what_a_variant_has_made_is_visited_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, times: int
) -> None:
    """Python's collector leaves out what is there when the loop begins, and complete variants."""
    calls: list[str] = []
    monkeypatch.setattr(loops, "settle", lambda: calls.append("settled"))
    monkeypatch.setattr(loops, "QUIET", 0.0)

    async def story(front: Front, loop: EngineLoop) -> None:
        assert isinstance(loop.engine, FakeEngine)
        loop.engine.to_improve = 3
        front.add(Request(1, (1,), 3))
        while loop.engine.to_improve:
            await asyncio.sleep(0)

    run(tmp_path, story, features)
    assert calls == ["settled"] * times


def test_an_engine_that_cannot_be_improved_ends_the_loop(tmp_path: Path) -> None:
    async def story(front: Front, loop: EngineLoop) -> None:
        assert isinstance(loop.engine, FakeEngine)
        loop.engine.urgent, loop.engine.to_improve = 1, -1
        front.add(Request(1, (1,), 3))
        await front.until(lambda: front.link.is_closed)

    with pytest.raises(AssertionError, match="nothing to improve"):
        run(tmp_path, story)


def test_a_thread_that_compiles_gives_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each rank, and where the front plays all of them."""

    def stop(*_: object) -> None:
        raise EOFError

    before = sys.getswitchinterval()
    monkeypatch.setattr(ranks, "parse", stop)
    monkeypatch.setattr(ranks, "prepare", stop)
    here = argparse.Namespace(features="")
    for start in (ranks.main, lambda: asyncio.run(ranks.serve_here(here, Path("engine")))):
        try:
            sys.setswitchinterval(1.0)
            with pytest.raises(EOFError):
                start()
            assert sys.getswitchinterval() == pytest.approx(ranks.SWITCH)
        finally:
            sys.setswitchinterval(before)


def test_a_request_that_the_front_should_have_refused(tmp_path: Path) -> None:
    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(Request(1, (1,) * 600, 3))
        await front.until(lambda: bool(front.ends))
        assert front.ends[1].reason == "error"
        assert "do not fit in 512" in front.ends[1].message

    run(tmp_path, story)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 100, b"\0\0\0\0\1", b"\3\0\0\0\2abc", b"\5\0\0\0\3abcde"]
)
def test_garbage_ends_the_loop(tmp_path: Path, garbage: bytes) -> None:
    """A front that sends it is not ours."""

    async def story(front: Front, loop: EngineLoop) -> None:
        transport = front.link._transport
        assert transport is not None
        transport.write(garbage)
        await front.until(lambda: front.link.is_closed)

    with contextlib.suppress(ValueError):  # which the loop raises, where it could read so far
        run(tmp_path, story)


def test_tokens_are_merged_while_nobody_reads(tmp_path: Path) -> None:
    requests = [Request(i, (i,), 400) for i in range(1, 9)]

    async def story(front: Front, loop: EngineLoop) -> None:
        front.add(*requests)
        loop.link.is_full = True  # as the transport says when its buffer is
        frames = len(front.frames)
        while not loop.scheduler.is_idle or not loop.engine.works:
            await asyncio.sleep(0)
        assert not front.ends
        loop.link.resume_writing()
        await front.until(lambda: len(front.ends) == len(requests))
        kinds = [kind for kind, _ in front.frames[frames:]]
        assert kinds.count(Kind.EVENTS) == 1
        for each in requests:
            assert front.tokens[each.id] == reference(each.prompt, 400, ROOMY)

    run(tmp_path, story)


def test_frames_that_come_together_share_a_chunk(tmp_path: Path) -> None:
    """A front that is behind reads several frames at a time, and writes each stream once."""

    def frame(token: int, *ends: End) -> bytes:
        payload = wire.pack_events(Events(pairs=array("I", (1, token, 2, token + 1)), ends=[*ends]))
        return wire._HEAD.pack(len(payload), Kind.EVENTS) + payload

    async def ask() -> None:
        metrics = Metrics(Counter())
        job = EngineJob([], tmp_path, Features(), 2, metrics)
        link, job.state = job._connect(), job_module.State.READY
        replies = [job.enter([Request(0, (1,), 9)]) for _ in range(2)]
        written: list[tuple[int, list[int]]] = []

        def writer(place: int, reply: Reply) -> Callable[[], bool]:
            def write() -> bool:
                written.append((place, reply.tokens[0]))
                reply.tokens[0] = []
                return True

            return write

        for place, reply in enumerate(replies):
            reply.write = writer(place, reply)
        together = frame(5) + frame(15) + frame(25, End(2, "length", 3))
        link.data_received(frame(3) + together[:9])  # the second is cut off
        assert written == [(0, [3]), (1, [4])]
        link.data_received(together[9:])
        assert written[2:] == [(0, [5, 15, 25]), (1, [6, 16, 26])]
        assert [reply.ends for reply in replies] == [[None], [End(2, "length", 3)]]
        assert metrics.generated_tokens == 8
        link.data_received(b"")
        assert len(written) == 4

    asyncio.run(ask())


def test_an_engine_in_the_process_of_the_front_says_why_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(path: Path) -> None:
        raise MemoryError(f"no room for the engine at {path.name}")

    job = EngineJob(fails, tmp_path, Features(), 1, Metrics(Counter()))
    with caplog.at_level(logging.INFO, "serve"):
        asyncio.run(asyncio.wait_for(job.run(), 60))
    assert "the engine has failed" in caplog.text
    assert "MemoryError: no room for the engine at engine" in caplog.text


def test_a_front_says_that_the_engine_is_not_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while no rank can say anything."""
    monkeypatch.setattr(job_module, "SAYING", 0.01)

    async def starts(path: Path) -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        job = EngineJob(starts, tmp_path, Features(), 1, Metrics(Counter()))
        running = asyncio.ensure_future(job.run())
        while "the engine is not ready yet, after" not in caplog.text:
            await asyncio.sleep(0.01)
        await job.close()
        running.cancel()

    with caplog.at_level(logging.INFO, "serve"):
        asyncio.run(asyncio.wait_for(story(), 60))
