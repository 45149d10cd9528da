"""Random pipelined steps, drawn and written down as traced modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis.strategies as st

from cg.ir.attributes import Effect, ReduceOp, Symbol
from cg.ir.location import Location
from cg.ir.ops import AllReduce, Backward, Call, Op, Return, Value, View
from cg.ir.ops.module import Function, FunctionKind, Module, Program, Vjp
from cg.ir.phases import Phase
from cg.ir.types import DType, Place, TensorType, Type, UnitType, relocate

HIDDEN = TensorType(DType.F32, (2, 4))
SCALAR = TensorType(DType.F32, ())


@dataclass
class Drawn:
    """The draw of a step; every microbatch repeats it."""

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
