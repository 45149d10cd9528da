"""Hosts that wait for their devices wherever they may: an oracle of standstills.

It plays hosts and devices by itself: before each op a host waits until all messages that it has put
on its device are over, which is the worst that a call of the host can do. It shares no code with
the checks.
"""

from __future__ import annotations

from collections import Counter

from cg.ir.ops import Communication, Free, Return, View, Wait
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.placement.fabrics import is_by_stream

Message = tuple[int, int]
"""The channel and the number of a message."""


class Hosts:
    """Every rank's host, and the messages on their devices."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.at = [0] * len(module.programs)
        self.put: list[list[Communication]] = [[] for _ in module.programs]
        self.over: set[Message] = set()
        self.ends = Counter(
            (op.chan, op.seq)
            for program in module.programs
            for op in program.ops
            if isinstance(op, Communication)
        )

    def stand_still(self) -> bool:
        """Let all hosts go as far as they come; True if one does not come to its end."""
        moves = True
        while moves:
            gone = sum(map(self._go, range(len(self.at))))
            moves = self._complete() or gone > 0
        ended = all(at == len(p.ops) for at, p in zip(self.at, self.module.programs, strict=True))
        return not (ended and len(self.over) == len(self.ends))

    def _go(self, rank: int) -> int:
        """Let a host go on until it is blocked; over how many ops it has come."""
        program = self.module.programs[rank]
        before = self.at[rank]
        while self.at[rank] < len(program.ops) and not self._is_blocked(rank, program):
            op = program.ops[self.at[rank]]
            if isinstance(op, Communication):
                self.put[rank].append(op)
            self.at[rank] += 1
        return self.at[rank] - before

    def _is_blocked(self, rank: int, program: Program) -> bool:
        op = program.ops[self.at[rank]]
        under_way = [one for one in self.put[rank] if (one.chan, one.seq) not in self.over]
        if isinstance(op, Wait):
            return any(one.result is op.operands[0] for one in under_way)
        if isinstance(op, Free | View | Return):
            return False
        return any(is_by_stream(self.module.channels[one.chan or 0]) for one in under_way)

    def _complete(self) -> bool:
        heads: Counter[Message] = Counter()
        for put in self.put:
            streams: set[object] = set()
            for op in put:
                message, stream = (op.chan or 0, op.seq or 0), op.stream or op
                if message not in self.over:
                    heads[message] += stream not in streams
                    streams.add(stream)
        ready = [message for message, ends in heads.items() if ends == self.ends[message]]
        self.over.update(ready)
        return bool(ready)


def refusal(module: Module) -> str | None:
    """What check-deadlock says against a module; None if it accepts it."""
    try:
        CheckDeadlock().run(module)
    except IRError as error:
        return str(error)
    return None
