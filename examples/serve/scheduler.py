"""Choose what runs next: continuous batching, chunked prefill, prefix cache, preemption.

The scheduler works on numbers, without tensors, clocks or sockets. A caller alternates `schedule`,
whose work it submits, and `complete` or `fail`. These take work in the order of submission within
each queue: the decodes of a group, or the prefill chunks.

Requests are admitted in the order of their arrival and the youngest is preempted first, so those
that hold blocks are always the oldest ones, and the oldest is never preempted: nobody starves
(`admission.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from .admission import Admission
from .features import Features
from .groups import Counts, Group, Guide, Numbers, Sequence, Tokens, runs
from .ngram import Propose
from .requests import ERROR, UNFOLLOWED, End, Events, How, Limits, Request, Scores
from .speculation import Speculation, look_up
from .tickets import Stats, Ticket
from .work import POSITION, SLOT, TOKEN, Chunk, Decode, Prefill, Record


class Scheduler:
    """The requests of one engine.

    Args:
        limits: of the engine; a sequence of `context` tokens must fit in the blocks.
        features: switches of ablations.
        proposes: makes what proposes the tokens of a request, if the engine takes proposals.
    """

    def __init__(
        self,
        limits: Limits,
        features: Features | None = None,
        proposes: Callable[[Request], Propose] = look_up,
    ) -> None:
        self.limits, self.features = limits, features or Features()
        self.admission = Admission(limits, self.features)
        self.blocks, self.active = self.admission.blocks, self.admission.active
        self.speculation = Speculation(limits, self.blocks, proposes)
        self.stats = Stats()
        self.waiting = self.admission.waiting
        self._all: dict[int, Sequence] = {}
        self._groups = [Group(number, limits) for number in range(limits.groups)]
        self._eos = frozenset(limits.eos)
        self._stops = Counter(limits.eos)  # tokens that end some request
        self._decodes = [0] * limits.groups  # in flight
        self._held = [False] * limits.groups  # whether it has waited for a first token
        self._chunks = self._first_tokens = 0  # in flight
        self._events = Events()
        self._advances: list[tuple[Guide, int]] = []

    # -- what clients do ---------------------------------------------------------------------------

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Let a request wait for its turn.

        Args:
            guide: of its grammar, ready for the first token; None without one.

        Raises:
            ValueError: the engine cannot serve it; the front checks this before.
        """
        limits, length = self.limits, len(request.prompt)
        if not length or request.max_tokens < 1 or length + request.max_tokens > limits.context:
            raise ValueError(
                f"{length} tokens and {request.max_tokens} more do not fit in {limits.context}"
            )
        if not 0 <= request.adapter <= limits.adapters:
            raise ValueError(f"adapter {request.adapter}, of {limits.adapters}")
        if min(request.prompt) < 0 or max(request.prompt) >= limits.vocabulary:
            raise ValueError(f"a token is not below {limits.vocabulary}")
        if request.id in self._all:
            raise ValueError(f"there is a request {request.id}")
        sequence = Sequence(request, np.array(request.prompt, np.uint32), guide=guide)
        self._all[request.id] = sequence
        self._stops.update(request.stops)
        self.waiting.append(sequence)

    def cancel(self, id_: int) -> None:
        """Forget a request, wherever it is, and its tokens in flight; unknown ids have ended."""
        sequence = self._all.get(id_)
        if sequence is not None:
            self._finish(sequence)

    @property
    def is_idle(self) -> bool:
        """True if there are no requests."""
        return not self._all

    @property
    def running(self) -> int:
        """How many requests hold blocks."""
        return len(self.active)

    def take_advances(self) -> list[tuple[Guide, int]]:
        """The tokens that guides have to take, since the last call."""
        advances, self._advances = self._advances, []
        return advances

    def guided(self, guide: Guide, id_: int) -> None:
        """Go on with a request whose guide has taken a token."""
        sequence = self._all.get(id_)
        if sequence is None or sequence.guide is not guide:
            return
        if guide.error:
            self._finish(sequence, UNFOLLOWED, guide.error)
        elif guide.is_complete:
            self._finish(sequence, "stop")
        elif sequence.seat is not None:
            group, slot = sequence.seat
            group.is_ready[slot] = True

    def take_events(self) -> Events:
        """The events since the last call."""
        events, self._events = self._events, Events()
        return events

    # -- what the engine does ----------------------------------------------------------------------

    def schedule(self) -> Iterator[Ticket]:
        """Give all work that can be submitted now; submit each piece before asking for the next."""
        for number, group in enumerate(self._groups):
            while not self._holds(number) and (ticket := self._decode(group)) is not None:
                self._decodes[number] += 1
                self._held[number] = False
                yield ticket
        # One chunk for each stage; no more beside decodes, which would wait for them.
        ahead = 2 if self.features.async_sched and not any(self._decodes) else 1
        while self._chunks < max(ahead, self.limits.groups):
            ticket = self._prefill()
            if ticket is None:
                break
            yield ticket

    def complete(
        self,
        ticket: Ticket,
        drawn: list[int],
        scores: Iterable[Scores] = (),
        prompt_scores: Iterable[Scores] = (),
        counts: Counts = (),
    ) -> None:
        """Take the tokens of work: of each row, or last chunk.

        Args:
            scores: of each token, where some are wanted.
            prompt_scores: of the token behind each of a chunk, where they are wanted.
            counts: how many tokens each row has; one, if it is empty.
        """
        self._land(ticket)
        if isinstance(ticket.work, Decode):
            self._decoded(ticket, ticket.work, drawn, scores, counts)
            return
        chunks, tokens = ticket.work.chunks, iter(drawn)
        for chunk, sequence, stay in zip(chunks, ticket.sequences, ticket.stays, strict=True):
            token = next(tokens) if chunk.last else None
            if sequence.stay != stay:
                continue
            self.admission.publish(sequence, sequence.tokens, chunk.start + len(chunk.tokens))
            for place, score in enumerate(prompt_scores, chunk.start + 1):  # of a chunk alone
                self._score_prompt(sequence, place, score)
            if token is not None:
                self._begin(sequence, token, scores)

    def fail(self, ticket: Ticket, message: str) -> None:
        """End the requests of work that has failed, and nobody else's."""
        self._land(ticket)
        for sequence in self.sequences(ticket):
            self._finish(sequence, ERROR, message)

    def sequences(self, ticket: Ticket) -> list[Sequence]:
        """The sequences of a ticket that still have the blocks that its work writes."""
        if isinstance(ticket.work, Decode):
            group, slots = self._groups[ticket.work.group], ticket.work.rows[:, SLOT]
            return list(group.members[slots[group.stays[slots] == ticket.stays]])
        pairs = zip(ticket.sequences, ticket.stays, strict=True)
        return [sequence for sequence, stay in pairs if sequence.stay == stay]

    # -- decode ------------------------------------------------------------------------------------

    def _depth(self, group: Group) -> int:
        """How many decodes of a group may be in flight: the second runs ahead of the stop check."""
        if self.features.async_sched and self.features.carry:
            return 2
        if self._decodes[group.number] and not self.features.async_sched:
            self.features.changes["async_sched"] += 1
        return 1

    def _holds(self, group: int) -> bool:
        """True if a group with nothing in flight waits, once, for a first token in flight."""
        if self._decodes[group] or not self._first_tokens or self._held[group]:
            return False
        if self._groups[group].count in (0, self.limits.slots):
            return False
        self._held[group] = True
        if not self.features.fill_tgt:
            self.features.changes["fill_tgt"] += 1
            return False
        return True

    def _decode(self, group: Group) -> Ticket | None:
        """The next step of a group: of sequences that speculate, or else of others."""
        runs_ahead = self._decodes[group.number] - group.waits < self._depth(group)
        if group.waits and not runs_ahead:
            return None
        for sequence in group.short():
            if sequence.seat is not None:  # else preempted just now, for an older one
                self._make_room(sequence)
        speculating = np.empty(0) if group.waits else group.wanting(speculating=True)
        if len(speculating):
            step = group.speculate(speculating, self.speculation.propose(group, speculating))
        elif not runs_ahead or (step := group.decode()) is None:
            return None
        work, stays = step
        self.stats.decodes += 1
        self.stats.rows += len(stays)
        self.features.changes["carry"] += 0 if self.features.carry else len(stays)
        return Ticket(work, stays, speculates=len(speculating) > 0)

    def _decoded(
        self,
        ticket: Ticket,
        work: Decode,
        drawn: list[int],
        scores: Iterable[Scores],
        counts: Counts,
    ) -> None:
        """Take the tokens of a step, for the sequences that are still there."""
        group, tokens = self._groups[work.group], np.array(drawn, np.uint32)
        row, step = runs(len(work.rows), counts)
        slots, places = work.rows[row, SLOT], work.rows[row, POSITION] + 1 + step
        taken = group.stays[slots] == ticket.stays[row]
        stops = self._ends(group, slots, tokens, taken)
        for at in stops.nonzero()[0] if counts else ():  # of which nothing follows the first
            taken &= (row != row[at]) | (step <= step[at])
        if not taken.all():
            row, slots, places = row[taken], slots[taken], places[taken]
            tokens, stops, scores = tokens[taken], stops[taken], compress(scores, taken)
        members = group.members[slots]
        group.tokens[slots, places] = tokens
        last = np.flatnonzero(np.diff(row, append=-1))  # of each row
        group.known[slots[last]] = places[last] + 1
        if work.proposals is not None:
            self.speculation.count(work.proposals, counts)
        if ticket.speculates:
            group.go_on(slots[last], places[last], tokens[last])
        elif not self.features.carry:
            group.rows[slots, TOKEN] = tokens
        self.stats.generated_tokens += len(slots)
        for at in (places % self.limits.block_size == 0).nonzero()[0]:
            self.admission.publish(members[at], group.tokens[slots[at]], places[at])
        self._tell(group.ids[slots[~stops]], tokens[~stops])
        for at in (group.is_guided[slots] & ~stops).nonzero()[0]:
            self._advance(members[at].guide, int(tokens[at]))
        for member, score, is_over in zip(members, scores, stops, strict=False):
            if not is_over:
                self._score(member.request, score)
        for at in (stops | (places == group.ends[slots])).nonzero()[0]:
            token = int(tokens[at]) if stops[at] else None
            self._finish(members[at], "length" if token is None else "stop", token=token)

    def _ends(self, group: Group, slots: Numbers, tokens: Tokens, taken: Any) -> Any:
        """Booleans, which tokens end the text of their sequence, of those that are taken."""
        ends = np.zeros(len(tokens), bool)
        if not self._stops.keys().isdisjoint(numbers := tokens.tolist()):
            for at in taken.nonzero()[0]:
                ends[at] = self._is_stop(group.members[slots[at]].request, numbers[at])
        return ends

    def _make_room(self, sequence: Sequence) -> None:
        """Take a block for the next position; without one, preempt the youngest, even itself."""
        while sequence.seat is not None:
            taken = self.blocks.take(1)
            if taken is not None:
                sequence.blocks += taken
                group, slot = sequence.seat
                group.extend(slot, sequence.blocks)
                return
            self._preempt(self.admission.youngest())

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it is computed again later, from all its tokens."""
        self.admission.preempt(sequence)
        self.stats.preemptions += 1

    # -- prefill -----------------------------------------------------------------------------------

    def _prefill(self) -> Ticket | None:
        """A chunk for each of the next prompts, if each chunk begins its prompt; else one chunk."""
        sequences: list[Sequence] = []
        chunks: list[Chunk] = []
        while len(chunks) < self.limits.prompts and (self.admission.prefilling or self._admit()):
            sequence = self.admission.prefilling[0]
            is_scored = How.SCORED in sequence.request.sampling.how or sequence.wants_scores
            guide = sequence.guide
            is_alone = bool(sequence.written or is_scored or guide)
            if (chunks and is_alone) or (guide is not None and not guide.is_ready):
                break
            length = self._length(sequence)
            if chunks and self.limits.lengths and length != len(chunks[0].tokens):
                break  # it would be padded
            chunks.append(self._chunk(sequence, length))
            sequences.append(sequence)
            if is_alone:
                break
        if not chunks:
            return None
        work = Prefill(tuple(chunks))
        self._chunks += 1
        self._first_tokens += work.draws
        return Ticket(work, np.array([member.stay for member in sequences]), tuple(sequences))

    def _length(self, sequence: Sequence) -> int:
        """The number of tokens of the next chunk of a sequence."""
        left = len(sequence.tokens) - sequence.written
        longest = self.limits.scored if sequence.wants_scores else self.limits.chunk
        lengths = self.limits.lengths or (min(left, longest),)
        if sequence.written and not self.limits.goes_on:
            return 1
        return max(length for length in lengths if length <= min(left, longest))

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        """The next chunk of a sequence, which is the first of those that are prefilled."""
        start, whole, wants = sequence.written, len(sequence.tokens), sequence.wants_scores
        end = sequence.written = start + length
        if end == whole:
            self.admission.prefilling.popleft()
        self.stats.chunks += 1
        self.stats.prompt_tokens += end - start
        tokens, blocks = sequence.tokens[start:end], tuple(sequence.blocks)
        request, record = sequence.request, None
        if end == whole and request.sampling.adjustments is not None:
            record = Record(sequence.record, sequence.tokens, len(request.prompt))
        following = None
        if wants:  # behind the last token is none yet
            following = np.append(sequence.tokens, np.uint32(0))[start + 1 : end + 1]
        guide, is_last = sequence.guide, end == whole
        mask = guide.mask if guide is not None and is_last else None
        place = sequence.place
        return Chunk(
            *(tokens, start, blocks, is_last, request.sampling, record, following, place),
            *(request.adapter, mask),
        )

    def _admit(self) -> bool:
        """Admit the first request that waits, and tell that it has started."""
        sequence = self.admission.admit()
        if sequence is not None and not sequence.is_started:
            sequence.is_started = True
            self._events.started.append(sequence.request.id)
        return sequence is not None

    # -- ends --------------------------------------------------------------------------------------

    def _land(self, ticket: Ticket) -> None:
        if isinstance(ticket.work, Decode):
            self._decodes[ticket.work.group] -= 1
            self._groups[ticket.work.group].waits &= not ticket.speculates
        else:
            self._chunks -= 1
            self._first_tokens -= ticket.work.draws

    def _begin(self, sequence: Sequence, token: int, scores: Iterable[Scores]) -> None:
        """Take the first token, and join the group with the fewest members.

        There is a free slot, since admission counts slots.
        """
        request = sequence.request
        sequence.tokens = np.append(sequence.tokens, np.uint32(token))
        self.stats.generated_tokens += 1
        if self._is_stop(request, token):
            self._finish(sequence, "stop", token=token)
            return
        self._tell([request.id], [token])
        if sequence.guide is not None:
            self._advance(sequence.guide, token)
        for score in scores:  # of a chunk alone
            self._score(request, score)
        if len(sequence.tokens) == len(request.prompt) + request.max_tokens:
            self._finish(sequence, "length")
        else:
            min(self._groups, key=lambda group: group.count).sit(sequence)

    def _is_stop(self, request: Request, token: int) -> bool:
        """True if the token ends the text of a request, and is no part of it."""
        return token in request.stops or (token in self._eos and not request.ignore_eos)

    def _tell(self, ids: Any, tokens: Any) -> None:
        """Add tokens to the events."""
        pairs = np.empty((len(ids), 2), np.uint32)
        pairs[:, 0], pairs[:, 1] = ids, tokens
        self._events.pairs.frombytes(pairs.tobytes())
        if not self.features.fast_cnt:
            self.features.changes["fast_cnt"] += len(ids)

    def _advance(self, guide: Guide, token: int) -> None:
        """Let a guide take a token; until it has, no other is drawn."""
        guide.is_ready = False
        self._advances.append((guide, token))

    def _score(self, request: Request, scores: Scores) -> None:
        limit = request.sampling.logprobs
        if limit is not None:
            scores = replace(scores, likeliest=scores.likeliest[:limit])
            self._events.scores.append((request.id, scores))

    def _score_prompt(self, sequence: Sequence, place: int, scores: Scores) -> None:
        """Tell the scores of a position of a prompt, once: it may be computed again."""
        request, limit = sequence.request, sequence.request.prompt_logprobs
        if sequence.scored < place < len(request.prompt):
            sequence.scored = place
            scores = replace(scores, likeliest=scores.likeliest[:limit])
            self._events.prompts.append((request.id, scores))

    def _finish(
        self, sequence: Sequence, reason: str = "", message: str = "", token: int | None = None
    ) -> None:
        """End a request; without a reason nobody is told, for the client has gone."""
        request = sequence.request
        del self._all[request.id]
        for stop in request.stops:
            self._stops[stop] -= 1
            if not self._stops[stop]:
                del self._stops[stop]
        self.admission.leave(sequence)
        if reason:
            drawn = len(sequence.tokens) - len(request.prompt)
            self._events.ends.append(End(request.id, reason, drawn, message, token))
