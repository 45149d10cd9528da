"""A trivial scheduler over an engine, and the oracle that says which tokens are right.

Requests arrive at random times and get all blocks at once; chunks, groups and slots are drawn.
It is here to show that tokens do not depend on any of this, and not to be fast.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from examples.serve.requests import Adjustments, Limits, Sampling
from examples.serve.sampling.draw import draw
from examples.serve.work import Chunk, Engine, Prefill, Record, Result

from .serve_oracle import adjusted, with_min_p
from .serve_work import Row, decode_of

GREEDY = Sampling()

NEAR = 1e-4
"""Scores that differ by less may come out either way: sums are rounded in another order."""


@dataclass
class Request:
    """A prompt and what came of it."""

    prompt: tuple[int, ...]
    most: int  # tokens to draw
    sampling: Sampling = GREEDY
    out: list[int] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass
class _Running:
    """A request with its place in the engine; `asked` tokens have been asked for."""

    request: Request
    known: tuple[int, ...]
    blocks: tuple[int, ...]
    shared: int
    place: int
    prefilled: int = 0
    asked: int = 0
    group: int = 0
    slot: int = -1
    is_over: bool = False


@dataclass(frozen=True)
class Habits:
    """How the scheduler behaves.

    Attributes:
        arriving: the chance that a waiting request arrives in a step.
        chunk: the longest chunk; lengths are drawn up to it if `ragged`.
        companions: requests in the engine at a time.
        preempting, cancelling: the chances that some request is, in a step.
        sharing: whether full blocks of equal prefixes are shared.
    """

    seed: int = 0
    arriving: float = 0.5
    chunk: int = 32
    ragged: bool = True
    companions: int = 8
    preempting: float = 0.0
    cancelling: float = 0.0
    sharing: bool = True


class Driver:
    """Runs requests on an engine until all have ended.

    Attributes:
        hits: how many blocks were shared.
        packed: how many executions took several prompts.
        preempted: how often a request was.
    """

    def __init__(self, engine: Engine, habits: Habits) -> None:
        self.hits = self.packed = self.preempted = 0
        self._engine = engine
        self._limits: Limits = engine.limits
        self._habits = habits
        self._most = min(habits.companions, self._limits.groups * self._limits.slots)
        self._random = random.Random(habits.seed)
        self._free = list(range(1, self._limits.blocks))
        self._places = list(range(1, self._limits.requests + 1))
        self._users: dict[int, int] = {}
        self._prefixes: dict[tuple[int, ...], int] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._under_way: list[list[tuple[Result, list[_Running]]]]
        self._under_way = [[] for _ in range(self._limits.groups)]
        self._chunks: list[tuple[Result, Prefill, list[_Running]]] = []

    def run(self, requests: list[Request]) -> None:
        """Run them all; their `out` has the tokens."""
        arriving = deque(requests)
        while arriving or self._waiting or self._running or self._chunks or any(self._under_way):
            while arriving and self._random.random() < self._habits.arriving:
                self._waiting.append(arriving.popleft())
            self._disturb()
            while self._waiting and len(self._running) < self._most:
                if not self._admit():
                    break
            moved = self._prefill()
            for group in range(self._limits.groups):
                moved = self._decode(group) or moved
            if not self._collect() and not moved:
                self._wait()
        assert len(self._free) == self._limits.blocks - 1, "blocks were lost"
        assert len(self._places) == self._limits.requests, "places were lost"

    # -- blocks -----------------------------------------------------------------------------

    def _admit(self) -> bool:
        request = self._waiting[0]
        known = (*request.prompt, *request.out)
        size = self._limits.block_size
        needed = -(-(len(request.prompt) + request.most) // size)
        shared: list[int] = []
        if self._habits.sharing and not self._limits.lengths:
            for end in range(size, len(known), size):  # the last token is always computed
                if known[:end] not in self._prefixes:
                    break
                shared.append(self._prefixes[known[:end]])
        if len(self._free) < needed - len(shared):
            assert self._running, "the pool is too small for a single request"
            return False
        self._random.shuffle(self._free)
        own = [self._free.pop() for _ in range(needed - len(shared))]
        blocks = (*shared, *own)
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1
        self.hits += len(shared)
        self._waiting.popleft()
        self._random.shuffle(self._places)
        place = self._places.pop()
        self._running.append(
            _Running(request, known, blocks, len(shared), place, len(shared) * size)
        )
        return True

    def _release(self, running: _Running) -> None:
        """At once, although executions may still write to its own blocks: they come first."""
        running.is_over = True
        self._running.remove(running)
        self._places.append(running.place)
        for block in running.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
                self._prefixes = {k: b for k, b in self._prefixes.items() if b != block}

    def _disturb(self) -> None:
        chance = self._random.random
        if self._running and chance() < self._habits.preempting:
            victim = self._random.choice(self._running)
            self._release(victim)
            self._waiting.appendleft(victim.request)
            self.preempted += 1
        if self._running and chance() < self._habits.cancelling:
            victim = self._random.choice(self._running)
            victim.request.is_cancelled = True
            self._release(victim)

    # -- work -------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """A chunk of a prompt, or the first ones of several."""
        if self._chunks:
            return False
        batch: list[_Running] = []
        chunks: list[Chunk] = []
        for running in self._running:
            left = len(running.known) - running.prefilled
            if not left or (chunks and running.prefilled):
                continue
            start = running.prefilled
            length = 1 if start and not self._limits.goes_on else self._length(left)
            if chunks and self._limits.lengths and length != len(chunks[0].tokens):
                continue
            end = start + length
            tokens, is_last = running.known[start:end], end == len(running.known)
            request, record = running.request, None
            if is_last and request.sampling.adjustments is not None:
                record = Record(running.place, running.known, len(request.prompt))
            sampling, blocks, place = request.sampling, running.blocks, running.place
            chunks.append(Chunk(tokens, start, blocks, is_last, sampling, record, None, place))
            batch.append(running)
            running.prefilled = end
            if start or len(chunks) == self._limits.prompts:
                break
        if chunks:
            work = Prefill(tuple(chunks))
            self.packed += len(chunks) > 1
            self._chunks.append((self._engine.submit(work), work, batch))
        return bool(chunks)

    def _length(self, left: int) -> int:
        """The number of tokens of a chunk, of so many that are left."""
        most = min(left, self._habits.chunk)
        lengths = [length for length in self._limits.lengths if length <= most]
        if self._habits.ragged:
            return self._random.choice(lengths or range(1, most + 1))
        return max(lengths, default=most)

    def _decode(self, group: int) -> bool:
        if len(self._under_way[group]) == 2:
            return False
        limits, batch, rows = self._limits, [], []
        for running in self._running:
            if running.group != group or running.slot < 0 or len(batch) == limits.slots:
                continue
            request = running.request
            drawn = len(running.known) - len(request.prompt) + running.asked
            if drawn >= request.most:
                continue
            position = len(running.known) + running.asked - 1
            token = request.out[-1] if running.asked == 1 else -1
            record = running.place if request.sampling.adjustments is not None else 0
            where = running.slot, running.blocks, request.sampling, record, running.place
            rows.append(Row(token, position, *where))
            batch.append(running)
            running.asked += 1
        if rows:
            result = self._engine.submit(decode_of(group, rows))
            self._under_way[group].append((result, batch))
        return bool(rows)

    def _wait(self) -> None:
        """Until something that is under way has ended."""
        results = [each[0] for each in chain(self._chunks, *self._under_way)]
        if results:
            results[0].result(60)

    def _collect(self) -> bool:
        """Take what has ended; true if anything has."""
        moved = False
        for each in [each for each in self._chunks if each[0].done()]:
            moved = True
            self._chunks.remove(each)
            result, work, batch = each
            tokens = iter(result.result())
            for running, chunk in zip(batch, work.chunks, strict=True):
                token = next(tokens) if chunk.last else None
                if running.is_over:
                    continue
                self._share(running)
                if token is not None:
                    running.asked = 1
                    self._take_slot(running)
                    self._deliver(running, token)
            assert next(tokens, None) is None
        for queue in self._under_way:
            while queue and queue[0][0].done():
                moved = True
                result, batch = queue.pop(0)
                for running, token in zip(batch, result.result(), strict=True):
                    if not running.is_over:
                        self._deliver(running, token)
        return moved

    def _take_slot(self, running: _Running) -> None:
        groups, slots = range(self._limits.groups), range(self._limits.slots)
        taken = {(each.group, each.slot) for each in self._running if each.slot >= 0}
        free = [(g, s) for g in groups for s in slots if (g, s) not in taken]
        running.group, running.slot = self._random.choice(free)

    def _share(self, running: _Running) -> None:
        """Let others read the full blocks that have been prefilled."""
        size = self._limits.block_size
        for index in range(min(running.prefilled, len(running.request.prompt)) // size):
            prefix = running.known[: (index + 1) * size]
            self._prefixes.setdefault(prefix, running.blocks[index])

    def _deliver(self, running: _Running, token: int) -> None:
        request = running.request
        request.out.append(token)
        if len(request.out) == request.most:
            self._release(running)


@torch.no_grad()
def differences(model: Any, requests: list[Request]) -> tuple[int, int]:
    """How many tokens an eager model would not have drawn, and how many more were near ties.

    The model is shown each request with its tokens, and asked for each of them. As the tokens
    ahead of one are those that were drawn, this is what generating one by one asks.

    Args:
        model: gives logits [1, tokens, vocabulary] of ids [1, tokens].
        requests: that have ended.
    """
    wrong = near = 0
    for request in requests:
        if not request.out:
            continue
        ids = torch.tensor([(*request.prompt, *request.out)])
        logits = model(ids[:, :-1])[0, len(request.prompt) - 1 :].float()
        for index, token in enumerate(request.out):
            at = len(request.prompt) + index
            row, changes = logits[index], request.sampling.adjustments
            if changes is not None:
                row = adjusted(row, request.prompt, request.out[:index], changes)
            wanted = _drawn(row, at, request.sampling)
            if wanted == token:
                continue
            shaken = row.clone()
            shaken[token] += NEAR
            shaken[wanted] -= NEAR
            if _drawn(shaken, at, request.sampling) == token:
                near += 1
            else:
                wrong += 1
    return wrong, near


def _drawn(logits: Tensor, position: int, sampling: Sampling) -> int:
    if sampling.temperature and sampling.adjustments is not None:
        scaled = logits / sampling.temperature
        logits = with_min_p(scaled, sampling.adjustments) * sampling.temperature
    return int(
        draw(
            logits[None],
            torch.tensor([position]),
            torch.tensor([sampling.seed]),
            torch.tensor([sampling.temperature]),
            torch.tensor([sampling.top_k]),
            torch.tensor([sampling.top_p]),
        )
    )


def random_adjustments(source: random.Random, vocabulary: int) -> Adjustments:
    """Some of all that there are, which leave tokens to be drawn."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(source.sample(range(vocabulary), source.randint(1, most)))

    held = some(6)
    changes: dict[str, Any] = {
        "banned": some(4),
        "allowed": tuple(source.sample(range(vocabulary), vocabulary // 2)),
        "bad_words": tuple(some(3) for _ in range(20)),
        "biases": tuple((token, source.uniform(-5, 5)) for token in some(20)),
        "repetition": source.choice([0.8, 1.3, 2.0]),
        "frequency": source.uniform(-1, 2),
        "presence": source.uniform(-1, 2),
        "min_p": source.choice([0.05, 0.3]),
    }
    chosen = source.sample(sorted(changes), source.randint(1, 4))
    adjustments = Adjustments(**{name: changes[name] for name in chosen})
    if source.random() < 0.5:
        adjustments = replace(adjustments, held=held, min_tokens=source.randint(1, 6))
    return adjustments


def random_requests(
    count: int, seed: int, limits: Limits, most: int = 12, share: float = 0.0
) -> list[Request]:
    """Requests with prompts that sometimes begin alike; every third one is sampled.

    Args:
        share: of those whose logits are adjusted.
    """
    source = random.Random(seed)
    longest = limits.context - most
    stems = [[source.randrange(limits.vocabulary) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        length = source.randint(1, longest)
        kept = source.randint(0, length)
        tail = [source.randrange(limits.vocabulary) for _ in range(length - kept)]
        prompt = (*source.choice(stems)[:kept], *tail)
        sampling = Sampling()
        if index % 3 == 0:
            top_k, top_p = source.choice([0, 5]), source.choice([1.0, 0.7])
            sampling = Sampling(source.choice([0.5, 1.0]), top_k, top_p, source.getrandbits(63))
        if share and source.random() < share:
            changes = random_adjustments(source, limits.vocabulary)
            sampling = replace(sampling, adjustments=changes)
        requests.append(Request(prompt, source.randint(1, most), sampling))
    return requests
