"""The meaning of a program whose functions mean nothing.

Functions are uninterpreted: a value is the name of the function that made it, its inputs, and the
state of the actor that it has read. Two programs that agree on such values agree on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from cg.ir.attributes import Effect
from cg.ir.ops import (
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Constant,
    Copy,
    Free,
    Op,
    Recv,
    ReduceScatter,
    Return,
    RowCollective,
    Send,
    Value,
    View,
    Wait,
    batch_of,
)
from cg.ir.ops.module import Function, FunctionKind, Module

Meaning = int
Inputs = tuple[tuple[Meaning, ...], ...]
"""Of a collective, those of each member."""


@dataclass
class World:
    """The meanings of values so far, and the state of actors: shared by all ranks."""

    interned: dict[Hashable, Meaning] = field(default_factory=dict)
    written: dict[str, Meaning] = field(default_factory=dict)
    accumulated: dict[str, list[Meaning]] = field(default_factory=dict)

    def meaning(self, *key: Hashable) -> Meaning:
        return self.interned.setdefault(key, len(self.interned))

    def call(self, function: Function, inputs: tuple[Meaning, ...]) -> list[Meaning]:
        state = -1
        if function.actor is not None and function.effect is not Effect.PURE:
            state = self.written.get(function.actor, -1)
        made = [
            self.meaning(function.name, index, inputs, state)
            for index in range(len(function.outputs))
        ]
        if function.actor is not None and function.effect is Effect.ACCUMULATE:
            self.accumulated.setdefault(function.actor, []).append(made[0])
        if function.actor is not None and function.effect is Effect.WRITE:
            gradients = tuple(sorted(self.accumulated.pop(function.actor, [])))
            self.written[function.actor] = self.meaning(made[0], gradients)
        return made

    def collective(self, op: Collective, inputs: Inputs, member: int) -> Meaning:
        """The meaning of what a member gets; `inputs` has those of each member, in their order."""
        if isinstance(op, Broadcast):
            ((whole,),) = (each for each in inputs if each)
            return whole
        if isinstance(op, RowCollective):
            # A member gets what the experts of all of them say, and its own.
            return self.meaning(op.opcode, inputs, op.experts, op.lead, member)
        scattered = isinstance(op, ReduceScatter | AllToAll)
        return self.meaning(op.opcode, inputs, member if scattered else None)

    def local(self, op: Op, inputs: tuple[Meaning, ...]) -> Meaning:
        if isinstance(op, View):
            return self.meaning("view", op.dim, op.start, op.length, inputs)
        if isinstance(op, Constant):
            return self.meaning("constant", op.fill, op.ref)
        assert isinstance(op, Copy | Wait)
        return inputs[0]


def run_async(module: Module, world: World) -> dict[int, tuple[Meaning, ...]]:
    """Run the one program of a module in phase ASYNC in its order; what each rank returns."""
    values = {v: world.meaning("input", v.name) for v in module.program.params}
    sent: dict[tuple[int, int], Meaning] = {}
    for op in module.program.ops:
        inputs = tuple(values[value] for value in op.operands)
        if isinstance(op, Return):
            assert op.at is not None
            return dict.fromkeys(op.at.ranks, inputs)
        if isinstance(op, Send):
            sent[op.chan, op.seq] = inputs[0]
            values[op.result] = 0
        elif isinstance(op, Recv):
            values[op.result] = sent[op.chan, op.seq]
        elif isinstance(op, Call):
            made = world.call(module.functions[op.fn.name], inputs)
            values.update(zip(op.results, made, strict=True))
        elif isinstance(op, Collective):
            given = _by_member(op, inputs)
            for member, value in enumerate(op.results):
                values[value] = world.collective(op, given, member)
        else:
            for value in op.results:
                values[value] = world.local(op, inputs)
    raise AssertionError("a program ends in return")


def _by_member(op: Collective, inputs: tuple[Meaning, ...]) -> Inputs:
    """The inputs of each member: all have their first ones first, then all their second ones."""
    if isinstance(op, Broadcast):
        return (inputs,)
    count = len(op.group.ranks)
    return tuple(inputs[member::count] for member in range(count))


@dataclass
class Slot:
    """A value in a slot of a channel, the message that brought it, and if it still does."""

    meaning: Meaning
    message: tuple[int, int]
    alive: bool = True


class Machine:
    """Runs scheduled programs by brute force: every rank, every message, one at a time, any order.

    It knows nothing of `cg.ir.verify.communication`: it keeps all that is posted in plain lists and
    looks through all of it whenever a rank is stuck.
    """

    def __init__(self, module: Module, world: World, choose: Callable[[int], int]) -> None:
        self.module, self.world, self.choose = module, world, choose
        ranks = range(module.world)
        self.at = [0] * module.world
        self.values: list[dict[Value, Meaning | Slot]] = [
            {v: world.meaning("input", v.name) for v in module.program_of(rank).params}
            for rank in ranks
        ]
        self.posted: dict[tuple[int, int], dict[int, Op]] = {}
        self.queues: dict[tuple[int, object], list[tuple[int, int]]] = {}
        self.contents: dict[tuple[int, int], Meaning] = {}
        self.given: dict[tuple[int, int], Inputs] = {}
        self.complete: set[tuple[int, int]] = set()
        self.occupied: dict[tuple[int, int | None], tuple[int, int]] = {}
        self.returned: dict[int, tuple[Meaning, ...]] = {}
        self.ops = [module.program_of(rank).ops for rank in ranks]
        self.keys = {
            value: (op.chan or 0, op.seq or 0)
            for ops in self.ops
            for op in ops
            if isinstance(op, Send | Recv | Collective)
            for value in op.results
        }

    def run(self) -> bool:
        """True if all ranks return, with no message in flight and no slot in use."""
        while True:
            moves: list[Callable[[], None]] = []
            for rank in range(self.module.world):
                if rank not in self.returned and self.can_step(rank):
                    moves.append(lambda rank=rank: self.step(rank))
            for key in self.posted:
                if key not in self.complete and self.can_complete(key):
                    moves.append(lambda key=key: self.finish(key))
            if not moves:
                break
            moves[self.choose(len(moves))]()
        in_flight = self.posted.keys() - self.complete
        return len(self.returned) == self.module.world and not in_flight and not self.occupied

    def op(self, rank: int) -> Op:
        return self.ops[rank][self.at[rank]]

    def can_step(self, rank: int) -> bool:
        op = self.op(rank)
        if not isinstance(op, Wait):
            return True
        key = self.keys.get(op.operands[0])
        return key is None or key in self.complete

    def can_complete(self, key: tuple[int, int]) -> bool:
        """True if a message, and all that are in a batch with it, can complete."""
        return all(map(self.is_in_reach, self.unit(key)))

    def unit(self, key: tuple[int, int]) -> list[tuple[int, int]]:
        """The messages that complete together with one, if all of them have been posted."""
        (rank, op), *_ = self.posted[key].items()
        batch = batch_of(op)
        if batch is None:
            return [key]
        mates = [other for other in self.ops[rank] if batch_of(other) == batch]
        return [(other.chan, other.seq) for other in mates]

    def is_in_reach(self, key: tuple[int, int]) -> bool:
        if key not in self.posted:
            return False
        channel = self.module.channels[key[0]]
        ends = self.posted[key]
        if ends.keys() != set(channel.ranks):
            return False
        for rank, op in ends.items():
            if op.stream is not None and self.queues[rank, op.stream][0] not in self.unit(key):
                return False
            if isinstance(op, Recv) and op.slot is not None and not self.is_next_in_slot(rank, op):
                return False
        return True

    def is_next_in_slot(self, rank: int, recv: Recv) -> bool:
        """True if a slot is empty, and all messages that it takes before this one have come."""
        for op in self.ops[rank]:
            same = isinstance(op, Recv) and (op.chan, op.slot) == (recv.chan, recv.slot)
            if same and op.seq < recv.seq and (op.chan, op.seq) not in self.complete:
                return False
        return (recv.chan, recv.slot) not in self.occupied

    def finish(self, first: tuple[int, int]) -> None:
        for key in self.unit(first):
            self.complete.add(key)
            for rank, op in self.posted[key].items():
                if op.stream is not None:
                    self.queues[rank, op.stream].remove(key)
                if isinstance(op, Recv) and op.slot is not None:
                    self.occupied[op.chan, op.slot] = key

    def read(self, rank: int, value: Value) -> Meaning:
        held = self.values[rank][value]
        if isinstance(held, Slot):
            assert held.alive, f"%{value.name} is read after its slot was freed"
            return held.meaning
        return held

    def step(self, rank: int) -> None:
        op = self.op(rank)
        self.at[rank] += 1
        if isinstance(op, Free):
            self.free(rank, op)
            return
        if isinstance(op, Send | Recv | Collective):
            self.post(rank, op)
            return
        if isinstance(op, Wait):
            self.wait(rank, op)
            return
        inputs = tuple(self.read(rank, value) for value in op.operands)
        if isinstance(op, Return):
            for value in op.operands:
                assert not isinstance(self.values[rank][value], Slot), "an output is in a slot"
            self.returned[rank] = inputs
        elif isinstance(op, Call):
            self.call(rank, op, inputs)
        elif isinstance(op, View) and isinstance(self.values[rank][op.operands[0]], Slot):
            raise AssertionError("no step here takes a view of what it has received")
        else:
            self.values[rank][op.result] = self.world.local(op, inputs)

    def call(self, rank: int, op: Call, inputs: tuple[Meaning, ...]) -> None:
        function = self.module.functions[op.fn.name]
        if function.kind is FunctionKind.OPAQUE:
            for value in op.operands:
                assert not isinstance(self.values[rank][value], Slot), "an opaque call has a slot"
        made: list[Meaning | Slot] = [*self.world.call(function, inputs)]
        for output, operand in function.aliases:
            held = self.values[rank][op.operands[operand]]
            if isinstance(held, Slot):
                meaning = made[output]
                assert isinstance(meaning, int)
                made[output] = Slot(meaning, held.message)
        self.values[rank].update(zip(op.results, made, strict=True))

    def post(self, rank: int, op: Op) -> None:
        assert isinstance(op, Send | Recv | Collective)
        key = (op.chan, op.seq)
        self.posted.setdefault(key, {})[rank] = op
        if op.stream is not None:
            self.queues.setdefault((rank, op.stream), []).append(key)
        inputs = tuple(self.read(rank, value) for value in op.operands)
        if isinstance(op, Collective):
            before = self.given.get(key, ((),) * len(op.group.ranks))
            at = op.group.ranks.index(rank)
            self.given[key] = (*before[:at], inputs, *before[at + 1 :])
        elif isinstance(op, Send):
            (self.contents[key],) = inputs

    def wait(self, rank: int, op: Wait) -> None:
        source = op.operands[0]
        key = self.keys.get(source)
        if not op.results:
            return
        if key is None:
            self.values[rank][op.result] = self.values[rank][source]
            return
        end = self.posted[key][rank]
        if isinstance(end, Recv) and end.slot is not None:
            self.values[rank][op.result] = Slot(self.contents[key], key)
        elif isinstance(end, Recv):
            self.values[rank][op.result] = self.contents[key]
        elif isinstance(end, Collective):
            at = end.group.ranks.index(rank)
            self.values[rank][op.result] = self.world.collective(end, self.given[key], at)
        else:
            self.values[rank][op.result] = 0

    def free(self, rank: int, op: Free) -> None:
        held = self.values[rank][op.operands[0]]
        if not isinstance(held, Slot):
            return
        held.alive = False
        # The slot is free with the last value that may alias the message.
        later = [o.operands[0] for o in self.ops[rank][self.at[rank] :] if isinstance(o, Free)]
        others = [self.values[rank].get(value) for value in later]
        if any(isinstance(other, Slot) and other.message == held.message for other in others):
            return
        end = self.posted[held.message][rank]
        assert isinstance(end, Recv)
        assert self.occupied.pop((end.chan, end.slot)) == held.message
