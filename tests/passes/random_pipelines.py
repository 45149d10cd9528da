"""Random pipelined steps, and what a program means when its functions mean nothing.

Functions are uninterpreted: a value is the name of the function that made it, its inputs, and the
state of the actor that it has read. Two programs that agree on such values agree on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st

from cg.ir.attributes import Effect, ReduceOp, Symbol
from cg.ir.location import Location
from cg.ir.module import Function, FunctionKind, Module, Phase, Program, Vjp
from cg.ir.ops import (
    AllReduce,
    AllToAll,
    Backward,
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
    Send,
    Value,
    View,
    Wait,
    batch_of,
)
from cg.ir.types import DType, Place, TensorType, Type, UnitType, relocate

HIDDEN = TensorType(DType.F32, (2, 4))
SCALAR = TensorType(DType.F32, ())


@dataclass
class Drawn:
    """What was drawn for a step; every microbatch repeats it."""

    world: int
    microbatches: int
    actors: list[int]
    stages: list[int]
    skips: list[list[int]]
    mixes: list[bool]
    summed: bool
    reduced: bool
    trained: bool
    opaque: int | None
    saves: bool
    gathered: bool


@st.composite
def drawn_steps(draw: Callable[..., object]) -> Drawn:
    """Up to 6 stages of up to 6 actors on up to 4 ranks, with skips, mixes and odd endings."""

    def number(low: int, high: int) -> int:
        found = draw(st.integers(low, high))
        assert isinstance(found, int)
        return found

    def coin() -> bool:
        return number(0, 1) == 1

    world, count = number(1, 4), number(1, 6)
    actors = [number(0, world - 1) for _ in range(number(1, 6))]
    stages = [number(0, len(actors) - 1) for _ in range(count)]
    # An opaque stage shares its actor with none: the microbatches could not overlap at all.
    alone = [s for s in range(count) if stages.count(stages[s]) == 1 and stages[s] != stages[-1]]
    return Drawn(
        world=world,
        microbatches=number(1, 8),
        actors=actors,
        stages=stages,
        skips=[sorted({number(0, s) for _ in range(number(0, 2))}) for s in range(count)],
        mixes=[number(0, 3) == 0 for _ in range(count)],
        summed=coin(),
        reduced=number(0, 3) == 0,
        trained=number(0, 3) > 0,
        opaque=alone[0] if alone and number(0, 3) == 0 else None,
        saves=coin(),
        gathered=coin(),
    )


class Maker:
    """Writes down the traced module of what was drawn."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self.module = Module("step", Phase.TRACED, drawn.world)
        self.ops: list[Op] = []
        self.line = 0

    def make(self) -> Module:
        drawn, everywhere = self.drawn, self.module.everywhere
        rows = TensorType(DType.F32, (2 * drawn.microbatches, 4), everywhere)
        x, y = Value("x", rows), Value("y", rows)
        total: Value | None = None
        losses = []
        for mb in range(drawn.microbatches):
            self.line = 10
            loss = self.microbatch(x, y, mb)
            if drawn.summed:
                total = loss if total is None else self.sum(total, loss, mb)
            losses.append(loss)
        self.line = 90
        loss = losses[0] if len(losses) == 1 else total if drawn.summed else self.mean(losses)
        assert loss is not None
        if drawn.trained:
            self.append(Backward((loss,)), None)
        for actor in sorted(set(drawn.stages)):
            name = f"actor{actor}.update"
            self.declare(Function(name, (), (UnitType(),), effect=Effect.WRITE, actor=name[:6]))
            self.call(name, (), UnitType(), drawn.actors[actor], None)
        outputs = (loss, losses[0]) if drawn.gathered else (loss,)
        self.ops.append(Return(outputs, at=everywhere))
        self.module.programs.append(Program("step", [x, y], self.ops))
        return self.module

    def microbatch(self, x: Value, y: Value, mb: int) -> Value:
        parts = []
        for source in (x, y):
            part = Value(f"{source.name}.{mb}", relocate(HIDDEN, source.type.place))
            self.append(View((source,), (part,), dim=0, start=2 * mb, length=2), mb)
            parts.append(part)
        made = [parts[0]]
        drawn = self.drawn
        for stage, actor in enumerate(drawn.stages):
            operands = [made[-1], *(made[skip] for skip in drawn.skips[stage])]
            if drawn.mixes[stage] and len(operands) > 1:
                mixed = self.differentiable("mix", None, tuple(operands[:2]), mb)
                operands = [mixed, *operands[2:]]
            made.append(self.differentiable(f"f{stage}", actor, tuple(operands), mb))
        last = drawn.stages[-1]
        if drawn.reduced and drawn.world > 1:
            made.append(self.all_reduce(made[-1], mb))
        return self.differentiable("loss", last, (made[-1], parts[1]), mb, SCALAR)

    def all_reduce(self, value: Value, mb: int) -> Value:
        ranks = tuple(range(self.drawn.world))
        result = Value(f"sum.{mb}", relocate(HIDDEN, Place(ranks)))
        group = Place(ranks)
        self.append(AllReduce((value,) * len(ranks), (result,), group=group, op=ReduceOp.SUM), mb)
        return result

    def differentiable(
        self,
        name: str,
        actor: int | None,
        operands: tuple[Value, ...],
        mb: int | None,
        out: TensorType = HIDDEN,
    ) -> Value:
        owner = None if actor is None else f"actor{actor}"
        mask = "".join("g" if self.has_gradient(value) else "n" for value in operands)
        full = f"{name}.{mask}" if owner is None else f"{owner}.{name}"
        inputs = tuple(relocate(value.type, None) for value in operands)
        if full not in self.module.functions:
            self.derive(full, owner, inputs, operands, out)
        if actor is None:
            rank = next((v for v in reversed(operands) if self.is_single(v)), None)
            place = operands[0].type.place if rank is None else rank.type.place
        else:
            place = Place.of(self.drawn.actors[actor])
        result = Value(f"{full}.{len(self.ops)}", relocate(out, place))
        vjp = Symbol(f"{full}.vjp") if f"{full}.vjp" in self.module.vjps else None
        self.append(Call(operands, (result,), fn=Symbol(full), vjp=vjp), mb)
        return result

    @staticmethod
    def is_single(value: Value) -> bool:
        place = value.type.place
        return place is not None and place.is_single

    def derive(
        self,
        full: str,
        owner: str | None,
        inputs: tuple[Type, ...],
        operands: tuple[Value, ...],
        out: TensorType,
    ) -> None:
        stage = full.rpartition(".f")[2]
        opaque = owner is not None and stage == str(self.drawn.opaque)
        kind = FunctionKind.OPAQUE if opaque else FunctionKind.GRAPH
        effect = Effect.PURE if owner is None else Effect.WRITE if opaque else Effect.READ
        self.declare(Function(full, inputs, (out,), kind, effect, owner))
        if opaque or not self.drawn.trained:
            return
        # Sums and means save nothing, as then no backward has to wait for all forwards.
        saves = owner is not None or (full.startswith("mix") and self.drawn.saves)
        saved = (HIDDEN,) if saves else ()
        flowing = tuple(i for i, value in enumerate(operands) if self.has_gradient(value))
        if owner is None and not flowing:
            return
        grads = tuple(inputs[i] for i in flowing) or (UnitType(),)
        # What is saved may be the first input itself, as autograd often does.
        aliases = ((1, 0),) if saved and inputs[0] == HIDDEN else ()
        self.declare(
            Function(f"{full}.fwd", inputs, (out, *saved), kind, effect, owner, aliases=aliases)
        )
        backward = Effect.PURE if owner is None else Effect.ACCUMULATE
        self.declare(
            Function(f"{full}.bwd", (*saved, out), grads, FunctionKind.GRAPH, backward, owner)
        )
        vjp = Vjp(f"{full}.vjp", f"{full}.fwd", f"{full}.bwd", (0,), flowing)
        if owner is not None:
            vjp = self.halves(vjp, owner)
        self.module.vjps[vjp.name] = vjp

    def halves(self, vjp: Vjp, owner: str) -> Vjp:
        """Declare halves of a backward: the second takes the cotangent and a value of the first."""
        whole = self.module.functions[vjp.backward]
        last = len(whole.inputs) - 1
        if not vjp.grad_inputs:
            return replace(vjp, weight=whole.name, kept=tuple(range(last + 1)))
        name = vjp.name.removesuffix(".vjp")
        first = replace(whole, name=f"{name}.b", outputs=(*whole.outputs, HIDDEN))
        second = replace(
            whole, name=f"{name}.w", inputs=(whole.inputs[last], HIDDEN), outputs=(UnitType(),)
        )
        self.declare(first)
        self.declare(second)
        return replace(vjp, input=first.name, weight=second.name, kept=(last,))

    def has_gradient(self, value: Value) -> bool:
        for op in reversed(self.ops):
            if value in op.results:
                if isinstance(op, AllReduce):
                    return any(self.has_gradient(operand) for operand in op.operands)
                return isinstance(op, Call) and op.vjp is not None
        return False

    def sum(self, a: Value, b: Value, mb: int) -> Value:
        return self.differentiable("add", None, (a, b), mb, SCALAR)

    def mean(self, losses: list[Value]) -> Value:
        return self.differentiable("mean", None, tuple(losses), None, SCALAR)

    def call(
        self, name: str, operands: tuple[Value, ...], out: Type, rank: int, mb: int | None
    ) -> Value:
        result = Value(f"{name}.{len(self.ops)}", relocate(out, Place.of(rank)))
        self.append(Call(operands, (result,), fn=Symbol(name)), mb)
        return result

    def append(self, op: Op, mb: int | None) -> None:
        self.line += 1
        op.mb, op.loc = mb, Location("step.py", self.line, "step")
        self.ops.append(op)

    def declare(self, function: Function) -> None:
        self.module.functions[function.name] = function


Meaning = int


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

    def collective(self, op: Collective, inputs: tuple[Meaning, ...], rank: int) -> Meaning:
        if isinstance(op, Broadcast):
            return inputs[0]
        scattered = isinstance(op, ReduceScatter | AllToAll)
        return self.meaning(op.opcode, inputs, rank if scattered else None)

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
            for rank, value in enumerate(op.results):
                values[value] = world.collective(op, inputs, rank)
        else:
            for value in op.results:
                values[value] = world.local(op, inputs)
    raise AssertionError("a program ends in return")


@dataclass
class Slot:
    """Something that lives in a slot of a channel, and until when it does."""

    meaning: Meaning
    alive: bool = True


class Machine:
    """Runs scheduled programs by brute force: every rank, every message, one at a time, any order.

    It knows nothing of `cg.ir.communication`: it keeps all that is posted in plain lists and looks
    through all of it whenever a rank is stuck.
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
        self.contents: dict[tuple[int, int], tuple[Meaning, ...]] = {}
        self.complete: set[tuple[int, int]] = set()
        self.occupied: dict[tuple[int, int | None], tuple[int, int]] = {}
        self.received: dict[Value, tuple[tuple[int, int], Slot]] = {}
        self.returned: dict[int, tuple[Meaning, ...]] = {}
        self.aliases: dict[int, list[Slot]] = {}
        self.ops = [module.program_of(rank).ops for rank in ranks]
        self.keys = {
            value: (op.chan or 0, op.seq or 0)
            for ops in self.ops
            for op in ops
            if isinstance(op, Send | Recv | Collective)
            for value in op.results
        }

    def run(self) -> bool:
        """Whether all ranks return, with no message in flight and no slot in use."""
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
        """Whether a message, and all that are in a batch with it, can complete."""
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
        """Whether a slot is empty, and all messages that it takes before this one have come."""
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
                made[output] = alias = Slot(meaning)
                self.aliases.setdefault(id(held), []).append(alias)
        self.values[rank].update(zip(op.results, made, strict=True))

    def post(self, rank: int, op: Op) -> None:
        assert isinstance(op, Send | Recv | Collective)
        key = (op.chan, op.seq)
        self.posted.setdefault(key, {})[rank] = op
        if op.stream is not None:
            self.queues.setdefault((rank, op.stream), []).append(key)
        inputs = tuple(self.read(rank, value) for value in op.operands)
        if isinstance(op, Collective) and not isinstance(op, Broadcast):
            # The operands of a group stand in the order of its ranks.
            before = self.contents.get(key, (0,) * len(op.group.ranks))
            at = op.group.ranks.index(rank)
            self.contents[key] = (*before[:at], *inputs, *before[at + 1 :])
        elif inputs:
            self.contents[key] = inputs

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
            slot = Slot(self.contents[key][0])
            self.values[rank][op.result] = slot
            self.received[op.result] = key, slot
        elif isinstance(end, Recv):
            self.values[rank][op.result] = self.contents[key][0]
        elif isinstance(end, Collective):
            at = end.group.ranks.index(rank)
            self.values[rank][op.result] = self.world.collective(end, self.contents[key], at)
        else:
            self.values[rank][op.result] = 0

    def free(self, rank: int, op: Free) -> None:
        key, slot = self.received.get(op.operands[0], (None, None))
        if key is None or slot is None:
            return
        end = self.posted[key][rank]
        assert isinstance(end, Recv)
        assert self.occupied.pop((end.chan, end.slot)) == key
        slot.alive = False
        for alias in self.aliases.get(id(slot), []):
            alias.alive = False
