"""Scheduler and blocks: every order of arrivals, ends, failures and cancellations."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from ...mpi.jobs import ROOT
from ...sampling import examples

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.blocks import Blocks, chain
from examples.serve.features import Features, parse
from examples.serve.front.admission import Admission
from examples.serve.groups import Sequence
from examples.serve.ngram import Propose
from examples.serve.requests import Adjustments, Limits, Request, Sampling, Scores
from examples.serve.scheduler import Scheduler
from examples.serve.tickets import Ticket
from examples.serve.work import TABLE, TOKEN, Decode, Prefill

from .fake_engine import TINY, FakeEngine, FakeResult, guess, reference, scores_of


class Harness:
    """A scheduler and an engine that runs when it is told to, and what each request was given."""

    def __init__(self, limits: Limits = TINY, features: Features | None = None) -> None:
        self.scheduler = Scheduler(limits, features, self.proposes)
        self.engine = FakeEngine(limits, fails=self.fail_one)
        self.failing: list[Exception] = []
        self.lanes: dict[int, list[tuple[Ticket, FakeResult]]] = {}
        self.got: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.counts: dict[int, int] = {}
        self.started: list[int] = []
        self.asked: dict[int, list[Scores]] = {}
        self.requests: dict[int, Request] = {}

    def fail_one(self, work: Decode | Prefill) -> Exception | None:
        return self.failing.pop() if self.failing else None

    def proposes(self, request: Request) -> Propose:
        """Guesses, of which some are right; sometimes there are fewer than are asked for."""
        vocabulary = self.engine.limits.vocabulary

        def propose(known: NDArray[np.uint32], most: int) -> list[int]:
            assert known[: len(request.prompt)].tolist() == list(request.prompt)
            guesses = guess(known, most, request.sampling, vocabulary)
            return guesses[: most - len(known) % 3]

        return propose

    def add(self, prompt: list[int], number: int, **options: object) -> int:
        request = Request(len(self.requests), tuple(prompt), number, **options)  # type: ignore[arg-type]
        self.requests[request.id] = request
        self.got[request.id] = []
        self.scheduler.add(request)
        return request.id

    def submit(self) -> None:
        for ticket in self.scheduler.schedule():
            lane = ticket.work.group if isinstance(ticket.work, Decode) else -1
            pair = (ticket, self.engine.submit(ticket.work))
            self.lanes.setdefault(lane, []).append(pair)

    def collect(self) -> None:
        for lane in self.lanes.values():
            while lane and lane[0][1].done():
                ticket, result = lane.pop(0)
                if result.error is not None:
                    self.scheduler.fail(ticket, str(result.error))
                else:
                    scores = result.result(), result.scores(), result.prompt_scores()
                    self.scheduler.complete(ticket, *scores, result.counts())
        events = self.scheduler.take_events()
        self.started += events.started
        for id_, token in zip(events.pairs[::2], events.pairs[1::2], strict=True):
            assert id_ not in self.ends, "a token behind the end"
            self.got[id_].append(token)
        for id_, scores in events.prompts:
            self.asked.setdefault(id_, []).append(scores)
        for end in events.ends:
            assert end.id not in self.ends, "two ends"
            self.ends[end.id], self.counts[end.id] = end.reason, end.count

    def turn(self) -> bool:
        """Run one piece of work, if there is any."""
        self.submit()
        if not self.engine.queue:
            return False
        self.engine.run_one()
        self.collect()
        return True

    def finish(self, most: int = 5000) -> None:
        """Run to the end; whoever is not served in so many turns starves."""
        self.collect()
        for _ in range(most):
            if not self.turn():
                break
        assert self.scheduler.is_idle, "somebody starves"

    def wanted(self, id_: int) -> list[int]:
        """The tokens that the request would draw alone."""
        request, limits = self.requests[id_], self.engine.limits
        ends = (*request.stops, *(() if request.ignore_eos else limits.eos))
        limits = replace(limits, eos=ends)
        return reference(request.prompt, request.max_tokens, limits, request.sampling)

    def wanted_scores(self, request: Request) -> list[Scores]:
        """Of the prompt's tokens but the first, if they are wanted."""
        if request.prompt_logprobs is None:
            return []
        pairs = [(request.prompt[:at], request.prompt[at]) for at in range(1, len(request.prompt))]
        scores = [scores_of(*pair, self.engine.limits.vocabulary) for pair in pairs]
        limit = request.prompt_logprobs
        return [replace(each, likeliest=each.likeliest[:limit]) for each in scores]

    def check(self, without: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Every request has ended with the tokens that it draws alone."""
        for id_, request in self.requests.items():
            if id_ in without:
                continue
            wanted = self.wanted(id_)
            assert self.got[id_] == wanted
            is_whole = len(wanted) == request.max_tokens
            assert self.ends[id_] == ("length" if is_whole else "stop")
            assert self.counts[id_] == len(wanted) + (not is_whole)
            assert self.asked.get(id_, []) == self.wanted_scores(request)

    def check_blocks(self) -> None:
        """References add up, used and available are all, and what is shared is not written."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        holders = Counter(block for each in scheduler.active.values() for block in each.blocks)
        assert [holders[block] for block in range(blocks.count)] == blocks.references
        assert blocks.used + blocks.available == blocks.count - 1
        assert blocks.used == len(holders)
        assert 0 not in holders
        places = [each.place for each in scheduler.active.values()]
        assert len(set(places)) == len(places)
        assert 0 not in places
        for block, count in holders.items():
            assert count == 1 or blocks.is_published(block)
        for sequence in scheduler.active.values():
            # What it still writes is nobody else's.
            assert not any(map(blocks.is_published, sequence.blocks[sequence.published :]))
            if sequence.seat is not None:
                group, slot = sequence.seat
                row = group.rows[slot, TABLE:]
                assert list(row[row > 0]) == sequence.blocks
                assert group.room[slot] == len(sequence.blocks) * blocks.size


PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=11)


class Machine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(11, 20),
        groups=st.integers(1, 3),
        slots=st.integers(2, 4),
        chunk=st.integers(1, 9),
        prompts=st.integers(1, 3),
        scored=st.integers(1, 9),
        lengths=st.sampled_from([(), (), (1, 4), (1, 2, 3)]),
        goes_on=st.booleans(),
        features=st.sampled_from(
            ["", "", "-prefix", "-async_sched", "-carry", "-fill_tgt", "-fast_cnt"]
        ),
        drafts=st.sampled_from([(0, False), (1, False), (4, False), (4, True)]),
    )
    def begin(
        self,
        blocks: int,
        groups: int,
        slots: int,
        chunk: int,
        prompts: int,
        scored: int,
        lengths: tuple[int, ...],
        goes_on: bool,
        features: str,
        drafts: tuple[int, bool],
    ) -> None:
        chunk = max(lengths, default=chunk)
        scored = max((n for n in lengths if n <= scored), default=min(chunk, scored))
        sizes = groups, slots, chunk, blocks, 3, 30, 50
        drafts = (0, False) if lengths else drafts
        limits = Limits(*sizes, (7, 8, 9), prompts, scored, *drafts, lengths, goes_on)
        self.it = Harness(limits, parse(features))
        self.cancelled: set[int] = set()

    @rule(
        prompt=PROMPTS,
        number=st.integers(1, 18),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([b"", b"a"]),
        seed=st.integers(0, 2),
        adjustments=st.sampled_from(
            [None, None, Adjustments(presence=1.0), Adjustments(min_p=0.1)]
        ),
        stops=st.sampled_from([(), (), (1, 2, 3, 4, 5, 6)]),
        asked=st.sampled_from([None, None, 0, 2]),
    )
    def add(
        self,
        prompt: list[int],
        number: int,
        ignore_eos: bool,
        salt: bytes,
        seed: int,
        adjustments: Adjustments | None,
        stops: tuple[int, ...],
        asked: int | None,
    ) -> None:
        sampling = Sampling(temperature=float(seed > 0), seed=seed, adjustments=adjustments)
        more = {"ignore_eos": ignore_eos, "salt": salt, "stops": stops, "prompt_logprobs": asked}
        self.it.add(prompt, number, sampling=sampling, **more)

    @rule()
    def submit(self) -> None:
        self.it.submit()

    @precondition(lambda self: self.it.engine.queue)
    @rule(number=st.integers(1, 4), looks=st.booleans())
    def run(self, number: int, looks: bool) -> None:
        for _ in range(min(number, len(self.it.engine.queue))):
            self.it.engine.run_one()
        if looks:
            self.it.collect()

    @rule()
    def collect(self) -> None:
        self.it.collect()

    @rule(number=st.integers(1, 30))
    def turn(self, number: int) -> None:
        for _ in range(number):
            self.it.turn()
            self.it.check_blocks()

    @precondition(lambda self: self.it.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.it.requests)))
        if id_ not in self.it.ends:
            self.cancelled.add(id_)
        self.it.scheduler.cancel(id_)

    @precondition(lambda self: self.it.engine.queue)
    @rule()
    def fail(self) -> None:
        ticket = next(
            ticket
            for lane in self.it.lanes.values()
            for ticket, result in lane
            if result is self.it.engine.queue[0]
        )
        self.cancelled |= {each.request.id for each in self.it.scheduler.sequences(ticket)}
        self.it.failing.append(ValueError("no"))
        self.it.engine.run_one()

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "it"):
            self.it.check_blocks()

    @invariant()
    def the_oldest_are_served(self) -> None:
        """Whoever waits is younger than whoever is active, so the oldest is always served."""
        if hasattr(self, "it"):
            active = list(self.it.scheduler.active)
            waiting = [each.request.id for each in self.it.scheduler.waiting]
            assert active + waiting == sorted(active + waiting)

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        self.it.finish()
        self.it.check_blocks()
        assert self.it.scheduler.blocks.used == 0
        assert self.it.scheduler.running == 0
        assert len(self.it.scheduler.admission.places) == self.it.scheduler.limits.requests
        self.it.check(without=self.cancelled)


def may_speculate(sampling: Sampling) -> bool:
    return sampling.seed != 1 and sampling.adjustments is None


def test_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests get no proposals, and share groups with others."""
    monkeypatch.setattr(Sampling, "speculates", property(may_speculate))
    run_state_machine_as_test(Machine, settings=examples(200, shrinks=True))


@pytest.mark.parametrize("has_draft", [False, True])
def test_proposals_change_no_token(has_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests without any, which run ahead; with few blocks, cancellations, and ends."""
    monkeypatch.setattr(Sampling, "speculates", property(may_speculate))
    accepted = preempted = ahead = 0
    for seed in range(30):
        chance = random.Random(seed)
        blocks, most = chance.choice([11, 14, 40]), chance.choice([1, 2, 4])
        it = Harness(Limits(2, 3, 5, blocks, 3, 30, 50, (7, 8), 2, 1, most, has_draft))
        cancelled = set()
        while len(it.requests) < 12:
            prompt = [chance.randrange(4) for _ in range(chance.randint(1, 11))]
            sampling = Sampling(chance.choice([0.0, 1.0]), seed=chance.randrange(3))
            ignores = chance.random() < 0.5
            it.add(prompt, chance.randint(1, 18), sampling=sampling, ignore_eos=ignores)
            for _ in range(chance.randrange(6)):
                it.turn()
                it.check_blocks()
                ahead = max(ahead, *(len(lane) for key, lane in it.lanes.items() if key >= 0), 0)
            id_ = chance.choice(list(it.requests))
            if chance.random() < 0.1 and id_ not in it.ends:
                cancelled.add(id_)
                it.scheduler.cancel(id_)
        it.finish()
        it.check(without=cancelled)
        it.check_blocks()
        assert it.scheduler.blocks.used == 0
        accepted += it.scheduler.speculation.accepted_tokens
        preempted += it.scheduler.stats.preemptions
    assert accepted > 300
    assert preempted > 10
    assert ahead > 1


def test_a_step_waits_for_the_tokens_that_others_are_proposed_behind() -> None:
    it = Harness(replace(TINY, draft_tokens=4, has_draft=True))
    it.add([1, 2], 9, ignore_eos=True)
    it.turn()
    it.submit()
    it.submit()
    assert len(it.engine.queue) == 1
    it.finish()
    it.check()
    speculation = it.scheduler.speculation
    assert it.scheduler.stats.decodes == 8 - speculation.accepted_tokens
    assert speculation.drafts <= it.scheduler.stats.decodes


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 0), (3, 4)])
def test_proposals_take_blocks_from_nobody(length: int, count: int) -> None:
    """Where no block is left, there are as many proposals as the sequence has room for."""
    it = Harness(replace(TINY, draft_tokens=4, has_draft=True))
    it.add([5] * length, 20, ignore_eos=True)
    it.turn()
    blocks = it.scheduler.blocks
    held = blocks.take(blocks.available - (2 if length == 3 else 0))
    it.submit()
    (result,) = it.engine.queue
    assert isinstance(result.work, Decode)
    assert result.work.proposals is not None
    assert result.work.proposals.counts.tolist() == [count]
    assert held is not None
    blocks.release(held)
    it.finish()
    it.check()
    assert it.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("blocks", [11, 12, 20])
def test_preemption_changes_no_token(blocks: int) -> None:
    it = Harness(Limits(2, 4, 5, blocks, 3, 30, 50, ()))
    for i in range(8):
        it.add([i] * (3 + i), 12)
    it.finish()
    it.check()
    assert it.scheduler.stats.preemptions > 0


PACKING = Limits(1, 8, 5, 60, 3, 30, 50, (), prompts=3)


def packs(it: Harness) -> list[list[tuple[int, int]]]:
    """Run to the end; where each chunk of each prefill starts, and how long it is."""
    found = []
    while not it.scheduler.is_idle:
        it.submit()
        work = it.engine.queue[0].work
        if isinstance(work, Prefill):
            found.append([(chunk.start, len(chunk.tokens)) for chunk in work.chunks])
        it.engine.run_one()
        it.collect()
    return found


def test_prompts_that_begin_share_a_prefill() -> None:
    """Up to so many; one that goes on is alone, with a single token, too."""
    it = Harness(PACKING)
    for length in (2, 12, 3, 4, 5, 1, 6):
        it.add([length] * length, 3)
    assert packs(it) == [
        [(0, 2), (0, 5)],
        [(5, 5)],
        [(10, 2)],
        [(0, 3), (0, 4), (0, 5)],
        [(0, 1), (0, 5)],
        [(5, 1)],
    ]
    it.check()


def test_a_prompt_that_is_in_the_cache_is_prefilled_alone() -> None:
    it = Harness(PACKING)
    shared = list(range(10, 22))
    it.add(shared, 1)
    it.finish()
    for prompt in ([1], [2, 2], [*shared, 3], [4], [5, 5]):
        it.add(prompt, 3)
    assert packs(it) == [[(0, 1), (0, 2)], [(12, 1)], [(0, 1), (0, 2)]]
    it.check()


def test_one_of_several_prompts_is_cancelled() -> None:
    it = Harness(PACKING)
    ids = [it.add([length] * length, 3) for length in (4, 5, 3)]
    it.submit()
    assert isinstance(work := it.engine.queue[0].work, Prefill)
    assert len(work.chunks) == 3
    it.scheduler.cancel(ids[1])
    it.add([9] * 5, 3)  # gets the blocks
    it.finish()
    it.check(without={ids[1]})
    assert it.got[ids[1]] == []
    assert it.scheduler.blocks.used == 0


def test_one_of_several_prompts_is_preempted() -> None:
    """While it is prefilled, for an older request that decodes; the other begins to decode."""
    it = Harness(Limits(1, 4, 6, 9, 3, 24, 50, (), prompts=3))
    oldest = it.add([1] * 3, 20)
    it.turn()
    for prompt in ([2] * 6, [3]):
        it.add(prompt, 3)
    it.submit()
    (pack,) = late = it.lanes.pop(-1)
    assert isinstance(pack[0].work, Prefill)
    assert len(pack[0].work.chunks) == 2
    while not it.scheduler.stats.preemptions:
        it.turn()
    assert [each.request.id for each in it.scheduler.sequences(pack[0])] == [oldest + 1]
    it.lanes[-1] = late + it.lanes.get(-1, [])
    it.finish()
    it.check()


def test_a_prefix_is_computed_once() -> None:
    it = Harness()
    shared = list(range(10, 22))
    it.add([*shared, 1], 2, ignore_eos=True)
    it.finish()
    before = it.scheduler.stats.prompt_tokens
    it.add([*shared, 2], 2, ignore_eos=True)
    it.add([*shared, 3], 2, ignore_eos=True, salt=b"other")
    it.finish()
    it.check()
    assert it.scheduler.stats.prompt_tokens - before == 1 + 13
    assert it.scheduler.blocks.hits == 12
    assert it.scheduler.blocks.queries == 3 * 13


def test_drawn_tokens_are_shared_too() -> None:
    it = Harness()
    it.add([1, 2, 3], 7, ignore_eos=True)
    it.finish()
    whole = [1, 2, 3, *it.got[0]]
    it.add([*whole, 5], 1, ignore_eos=True)
    it.finish()
    it.check()
    assert it.scheduler.blocks.hits == 9


def test_a_whole_prompt_in_the_cache_still_draws() -> None:
    it = Harness()
    for _ in range(2):
        it.add([1, 2, 3, 4, 5, 6], 3, ignore_eos=True)
        it.finish()
    it.check()
    assert it.scheduler.blocks.hits == 3  # the last block holds the token that has to be computed


def test_a_collision_of_digests_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.serve.blocks.digest", lambda before, tokens: b"always the same")
    it = Harness()
    it.add([1, 2, 3, 4], 2, ignore_eos=True)
    it.finish()
    it.add([4, 3, 2, 1], 2, ignore_eos=True)
    it.finish()
    it.check()
    assert it.scheduler.blocks.hits == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    blocks = Blocks(5, 2)
    root = chain(b"")
    taken = blocks.take(3)
    assert taken is not None
    name = root
    for block, part in zip(taken, ([1, 1], [2, 2], [3, 3]), strict=True):
        name = blocks.publish(block, name, part)
    blocks.release(taken)
    assert (blocks.available, blocks.used) == (4, 0)
    assert len(blocks.take(2) or ()) == 2  # the free one, and the end of the prefix
    found, _ = blocks.match([1, 1, 2, 2, 3, 3, 0], b"")
    assert found == taken[:2]
    assert blocks.take(1) is None
    with pytest.raises(ValueError, match="nobody holds it"):
        blocks.release([taken[2] for _ in range(2)])


def test_a_burst_is_decoded_together() -> None:
    """A group waits for the first tokens that are in flight, once, before it decodes alone."""
    shapes = {}
    for features in ("", "-fill_tgt"):
        it = Harness(Limits(1, 4, 5, 40, 3, 30, 50, ()), parse(features))
        for i in range(4):
            it.add([i, i], 4)
        it.finish()
        it.check()
        shapes[features] = it.scheduler.stats.decodes
        assert (it.scheduler.features.changes["fill_tgt"] > 0) == bool(features)
    assert shapes[""] <= shapes["-fill_tgt"]


@pytest.mark.parametrize(
    ("switch", "moves"),
    [("-prefix", True), ("-async_sched", True), ("-carry", True), ("-fast_cnt", True), ("", False)],
)
def test_switches_count_what_they_change(switch: str, moves: bool) -> None:
    it = Harness(features=parse(switch))
    for i in range(6):
        it.add([i, i, i, i], 6)
    it.finish()
    it.check()
    assert (it.scheduler.features.changes[switch[1:]] > 0) == moves


def test_a_second_decode_runs_ahead() -> None:
    it = Harness(Limits(1, 4, 5, 40, 3, 30, 50, ()))
    it.add([1, 2], 6)
    it.turn()
    it.submit()
    works = [result.work for result in it.engine.queue]
    assert [work.rows[0, TOKEN] >= 0 for work in works if isinstance(work, Decode)] == [True, False]
    it.finish()
    it.check()


def test_long_prompts_do_not_hold_decodes_up() -> None:
    """Between two decodes of a group are no more chunks than there are groups."""
    it = Harness(Limits(1, 4, 2, 40, 3, 30, 50, ()))
    it.add([1], 12)
    it.turn()
    it.add([2] * 18, 2)
    order: list[str] = []
    while not it.scheduler.is_idle:
        it.submit()
        if it.engine.queue:
            order.append("p" if isinstance(it.engine.queue[0].work, Prefill) else "d")
            it.engine.run_one()
            it.collect()
    it.check()
    assert "ppp" not in "".join(order[: order.index("d", 8)])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda it: it.add([], 1), "0 tokens and 1 more do not fit in 30"),
        (lambda it: it.add([1] * 30, 1), "30 tokens and 1 more do not fit in 30"),
        (lambda it: it.add([1], 0), "1 tokens and 0 more"),
        (lambda it: it.add([50], 1), "a token is not below 50"),
        (lambda it: it.add([-1], 1), "a token is not below 50"),
        (lambda it: [it.scheduler.add(Request(9, (1,), 1)) for _ in "12"], "there is a request 9"),
        (lambda it: Scheduler(Limits(1, 1, 1, 5, 2, 9, 9, ())), "give more blocks, or a shorter"),
        (lambda it: Blocks(1, 2), "1 blocks of 2 tokens hold nothing"),
    ],
)
def test_bad_requests(act: Callable[[Harness], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(Harness())


def test_admission_is_bounded_in_requests_and_tokens() -> None:
    admission = Admission(most_requests=2, most_tokens=100)
    assert admission.enter(1, 500)  # alone, whatever its length
    assert not admission.enter(1, 1)
    admission.leave(1, 500)
    assert admission.enter(1, 60)
    assert not admission.enter(1, 41)
    assert admission.enter(1, 40)
    assert not admission.enter(1, 0)
    admission.leave(2, 100)
    assert (admission.requests, admission.tokens) == (0, 0)


def test_features_are_read_as_they_are_written() -> None:
    assert parse("") == Features()
    chosen = parse("-prefix, +inproc -carry")
    assert chosen == Features(carry=False, prefix=False, inproc=True)


@pytest.mark.parametrize("text", ["prefix", "-prefiks", "+prefix", "-inproc", "-prefix,-prefix"])
def test_switches_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no feature|switches nothing"):
        parse(text)


def test_sequences_are_themselves() -> None:
    request, tokens = Request(1, (1,), 1), np.array([1], np.uint32)
    assert Sequence(request, tokens) != Sequence(request, tokens)
