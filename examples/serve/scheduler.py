"""What runs next: continuous batching, chunked prefill, a prefix cache, preemption, cancellation.

Plain Python over numbers: no tensors, no clock, no sockets. A caller alternates `schedule`, whose
work it submits, and `complete` or `fail`, in the order of submission within each lane (a group's
decodes; the prefill chunks).

Requests are admitted in the order of their arrival and the youngest is preempted first, so those
that hold blocks are always the oldest ones, and the oldest is never preempted: nobody starves.
Blocks of a request that ends are given away at once, even while its last execution is in flight:
ranks see executions in the order of submission, so a late write lands before the new owner's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from .blocks import Blocks, chain
from .features import Features
from .work import Decode, Limits, Prefill, Row, Sampling, Scores

GREEDY = Sampling()
ERROR = "error"
"""The reason of an end that comes with a message."""


@dataclass(frozen=True)
class Request:
    """What a client wants: `max_tokens` more tokens behind `prompt`."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    ignore_eos: bool = False
    salt: bytes = b""  # requests of different salts share no cached prefix


@dataclass(frozen=True)
class End:
    """The end of a request: `stop` at the end of its text, `length`, or `error` with a message."""

    id: int
    reason: str
    count: int  # of tokens that were drawn for it, a token that ends the text included
    message: str = ""


@dataclass
class Events:
    """What has happened since the last look: numbers, which cross processes as they are."""

    started: array[int] = field(default_factory=lambda: array("I"))  # ids, at their first admission
    pairs: array[int] = field(default_factory=lambda: array("I"))  # id, token, id, token, …
    ends: list[End] = field(default_factory=list)
    scores: list[tuple[int, Scores]] = field(default_factory=list)  # of tokens that want them

    def __bool__(self) -> bool:
        return bool(self.started or self.pairs or self.ends)


@dataclass(eq=False)
class Sequence:
    """A request on its way."""

    request: Request
    tokens: list[int]  # the prompt, and what has been drawn and is known
    blocks: list[int] = field(default_factory=list)
    written: int = 0  # positions whose keys and values have been asked for
    complete: int = 0  # positions whose keys and values are there
    published: int = 0  # blocks that are in the prefix cache, or could be
    digest: bytes = b""  # of the last of these
    seat: tuple[int, int] | None = None  # group and slot, while it decodes
    since: int = 0  # the first position that it has decoded there
    flying: int = 0  # executions in flight
    stay: int = 0  # grows with each preemption, so that older results are known as such
    is_active: bool = False  # holds blocks
    is_over: bool = False

    @property
    def drawn(self) -> int:
        """How many of the drawn tokens are known."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_sated(self) -> bool:
        """Whether all its draws have been asked for; meant of one that decodes."""
        return self.written - len(self.request.prompt) + 1 >= self.request.max_tokens


@dataclass(eq=False)
class Ticket:
    """Work in flight; sequences, each with the end of what it writes, and its stay."""

    work: Decode | Prefill
    shares: list[tuple[Sequence, int, int]]


@dataclass
class Stats:
    """Counts since the start."""

    preemptions: int = 0
    decodes: int = 0
    rows: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """The requests of one engine.

    Args:
        limits: of the engine; a sequence of `context` tokens must fit in the blocks.
        features: switches of ablations.
    """

    def __init__(self, limits: Limits, features: Features | None = None) -> None:
        if (limits.blocks - 1) * limits.block_size < limits.context:
            raise ValueError(
                f"{limits.blocks - 1} blocks of {limits.block_size} tokens hold no sequence of "
                f"{limits.context}: give more blocks, or a shorter context"
            )
        self.limits, self.features = limits, features or Features()
        self.blocks = Blocks(limits.blocks, limits.block_size)
        self.stats = Stats()
        self.waiting: deque[Sequence] = deque()
        self.active: dict[int, Sequence] = {}  # by id, in the order of arrival
        self._all: dict[int, Sequence] = {}
        self._newest = -1
        self._prefilling: deque[Sequence] = deque()  # admitted, with chunks to submit
        self._groups: list[dict[int, Sequence]] = [{} for _ in range(limits.groups)]  # by slot
        self._decodes = [0] * limits.groups  # in flight
        self._held = [False] * limits.groups  # whether it has waited for a first token
        self._chunks = self._last_chunks = 0  # in flight
        self._starved = False  # the first that waits found too few blocks, and none came since
        self._events = Events()

    # -- what clients do ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            ValueError: the engine cannot serve it; the front checks this before.
        """
        limits, length = self.limits, len(request.prompt)
        if not length or request.max_tokens < 1 or length + request.max_tokens > limits.context:
            raise ValueError(
                f"{length} tokens and {request.max_tokens} more do not fit in {limits.context}"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= limits.vocabulary:
            raise ValueError(f"a token is not below {limits.vocabulary}")
        if request.id <= self._newest:
            raise ValueError(f"request {request.id} comes after {self._newest}: ids grow")
        self._newest = request.id
        sequence = Sequence(request, list(request.prompt))
        self._all[request.id] = sequence
        self.waiting.append(sequence)

    def cancel(self, id_: int) -> None:
        """Forget a request, wherever it is, and its tokens in flight; unknown ids are past."""
        sequence = self._all.get(id_)
        if sequence is not None:
            self._finish(sequence)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._all

    @property
    def running(self) -> int:
        """How many requests hold blocks."""
        return len(self.active)

    def take_events(self) -> Events:
        """What has happened since this was called last."""
        events, self._events = self._events, Events()
        return events

    # -- what the engine does ----------------------------------------------------------------------

    def schedule(self) -> Iterator[Ticket]:
        """Give all work that can be submitted now; submit each piece before asking for the next."""
        for group in range(self.limits.groups):
            while self._decodes[group] < self._depth(group) and not self._holds(group):
                ticket = self._decode(group)
                if ticket is None:
                    break
                self._decodes[group] += 1
                self._held[group] = False
                yield ticket
        # One for each stage; beside decodes no more, for they would wait for these.
        ahead = 2 if self.features.async_sched and not any(self._decodes) else 1
        while self._chunks < max(ahead, self.limits.groups):
            ticket = self._prefill()
            if ticket is None:
                break
            yield ticket

    def complete(self, ticket: Ticket, drawn: list[int], scores: Collection[Scores] = ()) -> None:
        """Take the tokens of work: one for each share, and none of a chunk before the last.

        Args:
            scores: of each token, where some are wanted.
        """
        self._land(ticket)
        draws = isinstance(ticket.work, Decode) or ticket.work.last
        for share in ticket.shares:
            self._written(*share)
        shares = ticket.shares if draws else []
        of_each = scores or repeat(None, len(shares))
        for (sequence, _, _), token, its in zip(shares, drawn, of_each, strict=True):
            if not sequence.is_over:
                self._append(sequence, token, its)

    def fail(self, ticket: Ticket, message: str) -> None:
        """End the requests of work that has failed, and nobody else's."""
        self._land(ticket)
        for sequence, _, _ in ticket.shares:
            if not sequence.is_over:
                self._finish(sequence, ERROR, message)

    # -- decode ------------------------------------------------------------------------------------

    def _depth(self, group: int) -> int:
        """How many decodes of a group may be in flight: the second runs ahead of the stop check."""
        if self.features.async_sched and self.features.carry:
            return 2
        if self._decodes[group] and not self.features.async_sched:
            self.features.changes["async_sched"] += 1
        return 1

    def _holds(self, group: int) -> bool:
        """Whether a group with nothing in flight waits, once, for a first token that is."""
        if self._decodes[group] or not self._last_chunks or self._held[group]:
            return False
        if not self._groups[group] or len(self._groups[group]) == self.limits.slots:
            return False
        self._held[group] = True
        if not self.features.fill_tgt:
            self.features.changes["fill_tgt"] += 1
            return False
        return True

    def _decode(self, group: int) -> Ticket | None:
        rows: list[Row] = []
        shares: list[tuple[Sequence, int, int]] = []
        for sequence in sorted(self._groups[group].values(), key=lambda each: each.request.id):
            if sequence.seat is None or sequence.is_sated or not self._has_room(sequence):
                continue  # the first: preempted just now, for an older one
            assert sequence.seat is not None
            place = sequence.written
            is_carried = self.features.carry and place > sequence.since
            token = -1 if is_carried else sequence.tokens[place]
            slot = sequence.seat[1]
            rows.append(Row(token, place, slot, tuple(sequence.blocks), sequence.request.sampling))
            shares.append(self._share(sequence, place + 1))
        if not rows:
            return None
        self.stats.decodes += 1
        self.stats.rows += len(rows)
        self.features.changes["carry"] += 0 if self.features.carry else len(rows)
        return Ticket(Decode(group, tuple(rows)), shares)

    def _has_room(self, sequence: Sequence) -> bool:
        """Get a block for the next position, from the youngest if need be; False if that is it."""
        while len(sequence.blocks) * self.limits.block_size <= sequence.written:
            taken = self.blocks.take(1)
            if taken is not None:
                sequence.blocks += taken
                continue
            youngest = self.active[next(reversed(self.active))]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it is computed again later, from all its tokens."""
        self._vacate(sequence)
        sequence.stay += 1
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    # -- prefill -----------------------------------------------------------------------------------

    def _prefill(self) -> Ticket | None:
        if not self._prefilling and not self._admit():
            return None
        sequence = self._prefilling[0]
        start, whole = sequence.written, len(sequence.tokens)
        end = min(start + self.limits.chunk, whole)
        last = end == whole
        if last:
            self._prefilling.popleft()
            self._last_chunks += 1
        self._chunks += 1
        self.stats.chunks += 1
        self.stats.prompt_tokens += end - start
        work = Prefill(
            tuple(sequence.tokens[start:end]),
            start,
            tuple(sequence.blocks),
            last,
            sequence.request.sampling,
        )
        return Ticket(work, [self._share(sequence, end)])

    def _admit(self) -> bool:
        """Give the first that waits all blocks of its tokens, if there are enough and a seat."""
        if not self.waiting or self._starved:
            return False
        sequence = self.waiting[0]
        if sequence.flying or len(self.active) == self.limits.groups * self.limits.slots:
            return False
        found, digest = self._match(sequence)
        needed = -(-len(sequence.tokens) // self.limits.block_size) - len(found)
        # One block for each that is active, if any is: else what is admitted now is preempted soon.
        spare = len(self.active)
        taken = self.blocks.take(needed) if needed + spare <= self.blocks.available else None
        if taken is None:
            self.blocks.release(found)
            self._starved = True
            return False
        self.blocks.count_match(len(sequence.tokens), len(found))
        self.waiting.popleft()
        if not sequence.stay:
            self._events.started.append(sequence.request.id)
        sequence.blocks = found + taken
        sequence.published, sequence.digest = len(found), digest
        sequence.written = sequence.complete = len(found) * self.limits.block_size
        sequence.is_active = True
        self.active[sequence.request.id] = sequence
        self._prefilling.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> tuple[list[int], bytes]:
        salt = sequence.request.salt
        if self.features.prefix:
            return self.blocks.match(sequence.tokens, salt)
        self.features.changes["prefix"] += len(sequence.tokens)
        return [], chain(salt)

    # -- ends --------------------------------------------------------------------------------------

    def _share(self, sequence: Sequence, end: int) -> tuple[Sequence, int, int]:
        sequence.written = end
        sequence.flying += 1
        return sequence, end, sequence.stay

    def _land(self, ticket: Ticket) -> None:
        if isinstance(ticket.work, Decode):
            self._decodes[ticket.work.group] -= 1
        else:
            self._chunks -= 1
            self._last_chunks -= ticket.work.last
        for sequence, _, _ in ticket.shares:
            sequence.flying -= 1

    def _written(self, sequence: Sequence, end: int, stay: int) -> None:
        """Publish the blocks that a successful execution has filled."""
        if sequence.is_over or stay != sequence.stay:
            return
        sequence.complete = end
        if not self.features.prefix:
            return
        size = self.limits.block_size
        while (stop := (sequence.published + 1) * size) <= end:
            block = sequence.blocks[sequence.published]
            part = sequence.tokens[stop - size : stop]
            sequence.digest = self.blocks.publish(block, sequence.digest, part)
            sequence.published += 1

    def _append(self, sequence: Sequence, token: int, scores: Scores | None) -> None:
        request = sequence.request
        sequence.tokens.append(token)
        self.stats.generated_tokens += 1
        if token in self.limits.eos and not request.ignore_eos:
            self._finish(sequence, "stop")
            return
        self._events.pairs.extend((request.id, token))
        wanted = request.sampling.logprobs
        if scores is not None and wanted is not None:
            scores = Scores(scores.drawn, scores.likeliest[:wanted])
            self._events.scores.append((request.id, scores))
        if not self.features.fast_cnt:
            self.features.changes["fast_cnt"] += 1
        if sequence.drawn == request.max_tokens:
            self._finish(sequence, "length")
        elif sequence.is_active and sequence.seat is None:
            self._sit(sequence)

    def _sit(self, sequence: Sequence) -> None:
        """Join the group with the fewest members; there is a slot, as admission counts seats."""
        group = min(range(self.limits.groups), key=lambda each: len(self._groups[each]))
        members = self._groups[group]
        slot = next(slot for slot in range(self.limits.slots) if slot not in members)
        members[slot] = sequence
        sequence.seat, sequence.since = (group, slot), sequence.written

    def _finish(self, sequence: Sequence, reason: str = "", message: str = "") -> None:
        """End a request; without a reason nobody is told, for the client has gone."""
        sequence.is_over = True
        del self._all[sequence.request.id]
        if sequence.is_active:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
            self._starved = False
        if reason:
            self._events.ends.append(End(sequence.request.id, reason, sequence.drawn, message))

    def _vacate(self, sequence: Sequence) -> None:
        """Give back what an active sequence holds."""
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.written = sequence.complete = sequence.published = 0
        sequence.is_active = False
        del self.active[sequence.request.id]
        if sequence.seat is not None:
            group, slot = sequence.seat
            del self._groups[group][slot]
            sequence.seat = None
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self._starved = False
