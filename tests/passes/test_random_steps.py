"""Random traced steps: every pass keeps values, gradients and the order of writes.

An interpreter of its own runs a module in any phase before SCHEDULED, on integers. All functions
are linear, so the gradient of the loss with respect to an actor's weight is the difference that
one more of it makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cg.ir.attributes import Effect, Symbol
from cg.ir.ops import (
    AllReduce,
    Backward,
    Broadcast,
    Call,
    Collective,
    Constant,
    Copy,
    Op,
    Recv,
    Return,
    Send,
    Transfer,
    Value,
    Wait,
)
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Function, FunctionKind, Module, Program, Vjp
from cg.ir.phases import Phase
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.types import DType, Place, TensorType, UnitType, relocate
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline

from ..sampling import scaled

SCALAR = TensorType(DType.F32, ())
ACTORS = 4


@dataclass
class Run:
    """The results of running a module: outputs by rank, gradients by actor, writes by actor."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    writes: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    losses: int = 0


@dataclass(frozen=True)
class Step:
    """A traced module, and a body for each function: takes the run, weights and inputs."""

    module: Module
    bodies: dict[str, Callable[..., list[int]]]


class Interpreter:
    """Holds each value on each rank that has it, and takes it from that rank alone."""

    def __init__(self, step: Step, module: Module, weights: dict[str, int]) -> None:
        self.step, self.module, self.weights = step, module, weights
        self.run = Run()
        self.held: dict[tuple[Value, int], int] = {}
        self.messages: dict[tuple[int, int], int] = {}
        self.anywhere = module.phase is Phase.TRACED

    def get(self, value: Value, rank: int) -> int:
        if (value, rank) not in self.held and self.anywhere:
            rank = value.type.place.ranks[0]
        return self.held[value, rank]

    def put(self, value: Value, number: int) -> None:
        for rank in value.type.place.ranks:
            self.held[value, rank] = number

    def execute(self) -> Run:
        program = self.module.program
        for number, param in enumerate(program.params):
            self.put(param, number + 2)
        for op in program.ops:
            self.step_op(op)
        return self.run

    def step_op(self, op: Op) -> None:
        match op:
            case Constant():
                self.put(op.result, int(op.fill))
            case Call():
                self.call(op)
            case Copy() | Wait():
                for rank in op.result.type.place.ranks:
                    self.held[op.result, rank] = self.get(op.operands[0], rank)
            case Transfer():
                self.put(op.result, self.get(op.operands[0], op.operands[0].type.place.ranks[0]))
            case Send():
                (source,) = op.result.type.place.ranks
                self.messages[op.chan, op.seq] = self.get(op.operands[0], source)
                self.put(op.result, 0)
            case Recv():
                self.put(op.result, self.messages.pop((op.chan, op.seq)))
            case Collective():
                self.collective(op)
            case Backward():
                self.run.losses += sum(self.get(v, v.type.place.ranks[0]) for v in op.operands)
            case Return():
                for rank in op.at.ranks:
                    self.run.outputs[rank] = [self.get(value, rank) for value in op.operands]

    def collective(self, op: Collective) -> None:
        if isinstance(op, Broadcast):
            self.put(op.result, self.get(op.operands[0], op.root))
            return
        assert isinstance(op, AllReduce)
        parts = zip(op.operands, op.group.ranks, strict=True)
        self.put(op.result, sum(self.get(value, rank) for value, rank in parts))

    def call(self, op: Call) -> None:
        body = self.step.bodies.get(op.fn.name, add)
        for index, rank in enumerate(op.place.ranks):
            inputs = [self.get(value, rank) for value in op.operands]
            # An actor lives on one rank; only values repeat where the call is replicated.
            run = self.run if index == 0 else Run()
            for value, number in zip(op.results, body(run, self.weights, *inputs), strict=True):
                self.held[value, rank] = number


def add(run: Run, weights: dict[str, int], a: int, b: int) -> list[int]:
    return [a + b]


class Maker:
    """Draws a step; `draw` is hypothesis's."""

    def __init__(self, draw: Callable[..., int]) -> None:
        self.draw = draw
        world = self.number(1, 4)
        self.module = Module("step", Phase.TRACED, world)
        self.homes = {f"actor{i}": Place.of(self.number(0, world - 1)) for i in range(ACTORS)}
        self.bodies: dict[str, Callable[..., list[int]]] = {}
        self.coefficients: dict[Op, list[list[int]]] = {}
        self.ops: list[Op] = []
        self.pool: list[Value] = []
        self.makers: dict[Value, Op] = {}

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def place(self) -> Place:
        ranks = self.draw(st.sets(st.integers(0, self.module.world - 1), min_size=1).map(sorted))
        return Place(tuple(ranks))

    def pick(self) -> Value:
        return self.draw(st.sampled_from(self.pool))

    def make(self) -> Step:
        params = [Value("x", relocate(SCALAR, self.place()))]
        self.pool += params
        for number in range(self.number(1, 9)):
            kind = self.draw(
                st.sampled_from(["linear", "linear", "linear", "write", "sum", "fill"])
            )
            getattr(self, kind)(f"{kind}{number}")
        self.backwards()
        for actor, home in self.homes.items():
            self.update(actor, home)
        outputs = tuple(self.pick() for _ in range(self.number(0, 3)))
        self.ops.append(Return(outputs, at=self.place()))
        self.module.programs.append(Program("step", params, self.ops))
        return Step(self.module, self.bodies)

    def emit(self, op: Op) -> None:
        self.ops.append(op)
        self.pool += [v for v in op.results if isinstance(v.type, TensorType)]
        self.makers.update(dict.fromkeys(op.results, op))

    def fill(self, name: str) -> None:
        value = Value(name, relocate(SCALAR, self.place()))
        self.emit(Constant((), (value,), fill=float(self.number(1, 2))))

    def sum(self, name: str) -> None:
        group = self.place()
        result = Value(name, relocate(SCALAR, group))
        self.emit(AllReduce(tuple(self.pick() for _ in group.ranks), (result,), group=group))

    def linear(self, name: str) -> None:
        actor = self.draw(st.sampled_from([None, *self.homes]))
        place = self.place() if actor is None else self.homes[actor]
        operands = tuple(self.pick() for _ in range(self.number(1, 3)))
        outputs = self.number(1, 2)
        rows = [[self.number(-2, 2) for _ in operands] for _ in range(outputs)]
        results = tuple(Value(f"{name}.{i}", relocate(SCALAR, place)) for i in range(outputs))
        effect = Effect.PURE if actor is None else Effect.READ
        self.declare(name, len(operands), (SCALAR,) * outputs, actor, effect)
        self.bodies[name] = linear_body(rows, actor)
        mb = self.draw(st.sampled_from([None, 0, 1]))
        call = Call(operands, results, fn=Symbol(name), mb=mb)
        self.coefficients[call] = rows
        self.emit(call)

    def write(self, name: str) -> None:
        actor = self.draw(st.sampled_from(list(self.homes)))
        operands = tuple(self.pick() for _ in range(self.number(0, 2)))
        self.declare(name, len(operands), (SCALAR,), actor, Effect.WRITE, FunctionKind.OPAQUE)

        def body(run: Run, weights: dict[str, int], *inputs: int) -> list[int]:
            run.writes[actor].append(inputs)
            return [len(run.writes[actor])]

        self.bodies[name] = body
        result = Value(name, relocate(SCALAR, self.homes[actor]))
        self.emit(Call(operands, (result,), fn=Symbol(name)))

    def update(self, actor: str, home: Place) -> None:
        name = f"{actor}.update"
        self.declare(name, 0, (UnitType(),), actor, Effect.WRITE)

        def body(run: Run, weights: dict[str, int]) -> list[int]:
            run.writes[actor].append((run.gradients[actor],))
            return [0]

        self.bodies[name] = body
        self.emit(Call((), (Value(f"{actor}.done", UnitType(home)),), fn=Symbol(name)))

    def declare(
        self,
        name: str,
        inputs: int,
        outputs: tuple[TensorType | UnitType, ...],
        actor: str | None,
        effect: Effect,
        kind: FunctionKind = FunctionKind.GRAPH,
    ) -> None:
        self.module.functions[name] = Function(
            name, (SCALAR,) * inputs, outputs, effect=effect, actor=actor, kind=kind
        )

    def backwards(self) -> None:
        """One backward of a few losses, and the exact masks of the calls that lead to them."""
        flows = self.flows()
        losses = sorted(flows, key=lambda value: value.name)
        if not losses or not self.number(0, 5):
            return
        chosen = tuple(self.draw(st.sampled_from(losses)) for _ in range(self.number(1, 2)))
        wanted = set(chosen)
        for op in reversed(self.ops):
            if wanted.isdisjoint(op.results) or not flows.issuperset(wanted & {*op.results}):
                continue
            wanted.update(value for value in op.operands if value in flows)
            if isinstance(op, Call):
                self.derive(op, wanted, flows)
        self.emit(Backward(chosen))

    def flows(self) -> set[Value]:
        """Values that have a gradient: they depend on an actor's weight, not through a write."""
        found: set[Value] = set()
        for op in self.ops:
            has_weight = op in self.coefficients and self.function(op).actor is not None
            passes = isinstance(op, AllReduce) or op in self.coefficients
            if has_weight or (passes and not found.isdisjoint(op.operands)):
                found.update(op.results)
        return found

    def function(self, op: Call) -> Function:
        return self.module.functions[op.fn.name]

    def derive(self, op: Call, wanted: set[Value], flows: set[Value]) -> None:
        function, rows = self.function(op), self.coefficients[op]
        name, saved = function.name, (SCALAR,)
        grad_outputs = tuple(i for i, v in enumerate(op.results) if v in wanted)
        grad_inputs = tuple(i for i, v in enumerate(op.operands) if v in flows)
        effect = Effect.PURE if function.actor is None else Effect.ACCUMULATE
        self.declare(
            f"{name}.fwd",
            len(function.inputs),
            function.outputs + saved,
            function.actor,
            function.effect,
        )
        self.declare(
            f"{name}.bwd",
            1 + len(grad_outputs),
            (SCALAR,) * len(grad_inputs) or (UnitType(),),
            function.actor,
            effect,
        )
        forward = linear_body(rows, function.actor)

        def save(run: Run, weights: dict[str, int], *inputs: int) -> list[int]:
            return [*forward(run, weights, *inputs), 1000 + sum(inputs)]

        def backward(run: Run, weights: dict[str, int], saved: int, *given: int) -> list[int]:
            assert saved >= 1000 - 10**6
            if function.actor is not None:
                run.gradients[function.actor] += sum(given)
            return [
                sum(rows[o][i] * g for o, g in zip(grad_outputs, given, strict=True))
                for i in grad_inputs
            ] or [0]

        self.bodies[f"{name}.fwd"], self.bodies[f"{name}.bwd"] = save, backward
        self.module.vjps[f"{name}.vjp"] = Vjp(
            f"{name}.vjp", f"{name}.fwd", f"{name}.bwd", grad_outputs, grad_inputs
        )
        op.vjp = Symbol(f"{name}.vjp")


def linear_body(rows: list[list[int]], actor: str | None) -> Callable[..., list[int]]:
    def body(run: Run, weights: dict[str, int], *inputs: int) -> list[int]:
        weight = 0 if actor is None else weights[actor]
        return [sum(c * i for c, i in zip(row, inputs, strict=True)) + weight for row in rows]

    return body


@st.composite
def steps(draw: Callable[..., int]) -> Step:
    return Maker(draw).make()


def weights() -> dict[str, int]:
    return {f"actor{i}": 3 + i for i in range(ACTORS)}


def expected(step: Step) -> Run:
    """The results of the traced module, with gradients by differences."""
    run = Interpreter(step, step.module, weights()).execute()
    for actor in weights():
        more = weights() | {actor: weights()[actor] + 1}
        slope = Interpreter(step, step.module, more).execute().losses - run.losses
        run.gradients[actor] = slope
        assert run.writes[actor][-1] == (0,)
        run.writes[actor][-1] = (slope,)
    return run


PIPELINES = [
    "differentiate",
    "differentiate,dce,cse,dce",
    "differentiate,cse,place",
    "differentiate,insert-transfers,dce,cse",
    "differentiate,dce,cse,place,insert-transfers{broadcast_from=2},split-transfers",
    "differentiate,insert-transfers{broadcast_from=9},split-transfers,check-types",
]


@pytest.mark.parametrize("pipeline", PIPELINES)
@settings(max_examples=scaled(40))
@given(step=steps())
def test_passes_keep_what_a_step_means(pipeline: str, step: Step) -> None:
    right = expected(step)
    module = clone(step.module)
    PassManager(parse_pipeline(pipeline), verify=True, check=True).run(module)
    assert parse_module(format_module(module)) == module
    run = Interpreter(step, module, weights()).execute()
    assert run.outputs == right.outputs
    assert {**run.gradients} == {**right.gradients}
    assert run.writes == right.writes


@settings(max_examples=scaled(30))
@given(step=steps())
def test_passes_that_keep_the_phase_are_idempotent(step: Step) -> None:
    module = step.module
    for name in ("differentiate", "dce", "cse", "place"):
        first, again = PassManager(parse_pipeline(f"{name},{name}"), check=True).run(module)
        assert not again.changed, f"{name} after {'a change' if first.changed else 'none'}"


@settings(max_examples=scaled(30))
@given(step=steps())
def test_after_insertion_no_value_travels_twice_to_a_rank(step: Step) -> None:
    module = step.module
    PassManager(parse_pipeline("differentiate,insert-transfers{broadcast_from=9}")).run(module)
    seen = set()
    for op in module.program.ops:
        if isinstance(op, Transfer) and op.result.type.place.is_single:
            edge = (op.operands[0], op.result.type.place)
            assert edge not in seen
            seen.add(edge)
