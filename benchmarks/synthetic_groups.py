"""Traced modules of pipelines whose stages are actors on groups of ranks, made without tracing.

A stage is a row of blocks `h + relu(h @ up) @ down`, two a layer, as the attention and the MLP of a
transformer. `up` is cut by columns along the axis tp, and `down` by rows. So each block takes one
all-reduce forward and one backward, as Megatron-LM has them, and its methods are programs: parts,
and transfers between them.

With experts a block is a mixture of them. They are spread along the second axis, `ep`, which cuts
tokens, too: a router's ids and the rows of tokens are gathered, and results are reduced to the
tokens of each rank. Of each token two experts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cg.ir.attributes import Effect, Symbol
from cg.ir.layout import Cut, Layout, Region
from cg.ir.ops import Backward, Call, Op, Return, Transfer, Value, View
from cg.ir.ops.module import Function, FunctionKind, Module, Program, Vjp
from cg.ir.phases import Phase
from cg.ir.types import DType, FutureType, Mesh, Place, TensorType, UnitType, ValueType


@dataclass(frozen=True)
class GroupSteps:
    """A training step of a pipeline of groups.

    Attributes:
        groups: the axes dp and tp, or ep, of each group, whose ranks follow those of the group
            before; or the number of ranks of a group that is no mesh, and cuts batches along its
            axis `*`.
        homes: the group of each stage; one on each group without.
        microbatches: how many there are.
        layers: of each stage, two blocks each.
        experts: of each block; none if 0.
        rows, tokens, width, hidden: sizes of a microbatch and of a block.
        dtype: of all tensors.
    """

    groups: tuple[tuple[int, int] | int, ...]
    homes: tuple[int, ...] = ()
    microbatches: int = 4
    layers: int = 1
    experts: int = 0
    rows: int = 4
    tokens: int = 2
    width: int = 4
    hidden: int = 4
    dtype: DType = DType.F32

    @property
    def stages(self) -> tuple[int, ...]:
        """The group of each stage."""
        return self.homes or tuple(range(len(self.groups)))

    @property
    def blocks(self) -> int:
        """Blocks of each stage."""
        return 2 * self.layers

    @property
    def weights(self) -> int:
        """Elements of all weights of a stage: of each block `up`, by columns, and then `down`."""
        return self.blocks * 2 * self.width * self.hidden

    def places(self) -> list[Place]:
        """The place of each group."""
        found: list[Place] = []
        first, second = 0, "ep" if self.experts else "tp"
        for number, group in enumerate(self.groups):
            count = group if isinstance(group, int) else group[0] * group[1]
            ranks = tuple(range(first, first + count))
            first += count
            if isinstance(group, int):
                found.append(Place(ranks))
            else:
                found.append(Mesh(ranks, f"m{number}", (("dp", group[0]), (second, group[1]))))
        return found


def group_module(steps: GroupSteps) -> Module:
    """The step in phase TRACED.

    Each microbatch passes through `s{i}.forward` of every stage and the loss of the last, which is
    a sum over its elements. The mean of the losses goes backward. Every stage then adds up its
    gradients along dp, in `s{i}.reduce_gradients`, and updates its weights. Inputs come to, and
    the loss is returned to, every rank.
    """
    places = steps.places()
    world = sum(len(place.ranks) for place in places)
    module = Module("step", Phase.TRACED, world)
    module.meshes.update((place.name, place) for place in places if isinstance(place, Mesh))
    stages = [_Stage(module, steps, i, places[home]) for i, home in enumerate(steps.stages)]
    for stage in stages:
        stage.declare()
    last = stages[-1]
    last.declare_loss()
    _declare_mean(module, steps)
    everywhere = module.everywhere
    shape = (steps.rows * steps.microbatches, steps.tokens, steps.width)
    batch = TensorType(steps.dtype, shape, everywhere)
    x, y = Value("x", batch), Value("y", batch)
    ops: list[Op] = []
    losses = tuple(_microbatch(ops, (x, y), stages, mb) for mb in range(steps.microbatches))
    loss = Value("loss", TensorType(steps.dtype, (), last.place))
    ops.append(Call(losses, (loss,), fn=Symbol("mean"), vjp=Symbol("mean.vjp")))
    ops.append(Backward((loss,)))
    for name in ("reduce_gradients", "update"):
        for stage in stages:
            done = Value(f"{stage.actor}.{name}", UnitType(stage.place))
            ops.append(Call((), (done,), fn=Symbol(f"{stage.actor}.{name}")))
    ops.append(Return((loss,), at=everywhere))
    module.programs.append(Program("step", [x, y], ops))
    return module


def _microbatch(ops: list[Op], inputs: Sequence[Value], stages: Sequence[_Stage], mb: int) -> Value:
    first, last, steps = stages[0], stages[-1], stages[0].steps
    parts = []
    for source, stage in zip(inputs, (first, last), strict=True):
        whole = TensorType(steps.dtype, (steps.rows, steps.tokens, steps.width), source.type.place)
        view = Value(f"{source.name}.{mb}", whole)
        ops.append(View((source,), (view,), start=mb * steps.rows, length=steps.rows, mb=mb))
        parts.append(_brought(ops, view, stage, mb))
    hidden, target = parts
    for stage in stages:
        hidden = _brought(ops, hidden, stage, mb)
        out = Value(f"h.{mb}.{stage.actor}", stage.passed)
        name = f"{stage.actor}.forward"
        ops.append(Call((hidden,), (out,), fn=Symbol(name), vjp=Symbol(f"{name}.vjp"), mb=mb))
        hidden = out
    loss = Value(f"loss.{mb}", TensorType(steps.dtype, (), last.place))
    name = f"{last.actor}.loss"
    ops.append(Call((hidden, target), (loss,), fn=Symbol(name), vjp=Symbol(f"{name}.vjp"), mb=mb))
    return loss


def _brought(ops: list[Op], value: Value, stage: _Stage, mb: int) -> Value:
    """The value as a stage takes it. Copies travel without being asked to."""
    wanted = stage.passed
    assert isinstance(value.type, TensorType), "stages pass tensors on"
    if value.type == wanted or (value.type.layout is None and wanted.layout is None):
        return value
    brought = Value(f"{value.name}.{stage.actor}", wanted)
    ops.append(Transfer((value,), (brought,), mb=mb))
    return brought


def _declare_mean(module: Module, steps: GroupSteps) -> None:
    scalar = TensorType(steps.dtype, ())
    inputs = (scalar,) * steps.microbatches
    module.functions["mean"] = Function("mean", inputs, (scalar,))
    module.functions["mean.bwd"] = Function("mean.bwd", (scalar,), inputs)
    everything = tuple(range(steps.microbatches))
    module.vjps["mean.vjp"] = Vjp("mean.vjp", "mean", "mean.bwd", (0,), everything)


class _Stage:
    """The methods of one stage's actor.

    Attributes:
        hidden: what comes to the stage and leaves it; `passed` with its place.
        taken: what its first product takes: with experts, the tokens of all ranks along ep.
        inner: what a block has between its products.
        summand: what its second product gives.
        saved: what a block keeps for its backward.
    """

    def __init__(self, module: Module, steps: GroupSteps, number: int, place: Place) -> None:
        self.steps = steps
        self.place = place
        self.actor = f"s{number}"
        self.module = module
        self._is_first = number == 0
        axes = [axis for axis, _ in place.axes]
        single = place.is_single and not isinstance(place, Mesh)
        self._dp = () if single else (axes[0],)
        self._tp = tuple(axes[1:])
        rows, tokens, width = steps.rows, steps.tokens, steps.width
        self._rows = (*self._dp, *self._tp) if steps.experts else self._dp
        self.taken = self._type((rows, tokens, width), (self._dp, (), ()))
        self.hidden = self._type((rows, tokens, width), (self._rows, (), ()))
        self.passed = replace(self.hidden, place=place)
        self.summand = self._type((rows, tokens, width), (self._dp, (), ()), self._tp)
        units = () if steps.experts else self._tp
        self.inner = self._type((rows, tokens, steps.hidden), (self._dp, (), units))
        self.saved: tuple[TensorType, ...] = (self.taken, self.inner)
        if steps.experts:
            ids = self._type((rows * tokens, 2), (self._dp, ()))
            self.ids = replace(ids, dtype=DType.I64)
            self._own_ids = replace(self.ids, layout=Layout.of([Cut(self._rows), Cut(())]))
            self.saved += (self.ids,)

    def _type(
        self,
        shape: tuple[int, ...],
        cuts: Sequence[tuple[str, ...]],
        summands: tuple[str, ...] = (),
    ) -> TensorType:
        layout = Layout.of([Cut(axes) for axes in cuts], summands)
        return TensorType(self.steps.dtype, shape, layout=layout)

    @property
    def experts(self) -> tuple[Region, ...]:
        """Those of each rank of the place."""
        count, ways = self.steps.experts, dict(self.place.axes)[self._tp[0]]
        own = [(((i * count // ways, (i + 1) * count // ways),),) for i in range(ways)]
        return tuple(own * (len(self.place.ranks) // ways))

    def declare(self) -> None:
        """All but the loss."""
        self._declare_forward("forward", saves=False)
        self._declare_forward("forward.fwd", saves=True)
        self._declare_backward("forward.bwd", Effect.ACCUMULATE, splits=False)
        blocks = self.steps.blocks
        halves: dict[str, str] = {"weight": f"{self.actor}.forward.bwd"}
        kept = tuple(range(len(self.saved) * blocks + 1))
        if not self._is_first:
            self._declare_backward("forward.in", Effect.READ, splits=True)
            self._declare_weight("forward.w")
            halves = {"input": f"{self.actor}.forward.in", "weight": f"{self.actor}.forward.w"}
        name = f"{self.actor}.forward"
        grad_inputs = () if self._is_first else (0,)
        self.module.vjps[f"{name}.vjp"] = Vjp(
            f"{name}.vjp", f"{name}.fwd", f"{name}.bwd", (0,), grad_inputs, kept=kept, **halves
        )
        self._declare_reduction()
        self.function("update", (), (UnitType(),), Effect.WRITE, FunctionKind.OPAQUE)

    def _declare_forward(self, name: str, saves: bool) -> None:
        body = _Body(self, name, Effect.READ)
        hidden = body.param(self.hidden)
        saved: list[Value] = []
        reduced: tuple[Value, ...] = ()
        for _ in range(self.steps.blocks):
            ids: list[Value] = []
            if self.steps.experts:
                if reduced:
                    (hidden,), reduced = body.part((hidden, *reduced), [self.hidden]), ()
                ids = [
                    body.transfer(each, self.ids) for each in body.part((hidden,), [self._own_ids])
                ]
            taken = body.transfer(hidden, self.taken, ids)
            types = [self.hidden] * bool(reduced) + [self.summand] + [self.inner] * saves
            made = body.part((taken, *ids, *reduced), types)
            if reduced:
                taken = hidden = made.pop(0)
            reduced = (body.transfer(made[0], self.hidden, ids),)
            saved += (taken, made[1], *ids) if saves else ()
        body.finish((*body.part((hidden, *reduced), (self.hidden,)), *saved))

    def _declare_backward(self, name: str, effect: Effect, splits: bool) -> None:
        """The backward, or its first half: for each block but the last, less what is put off."""
        body = _Body(self, name, effect)
        saved = [[body.param(type_) for type_ in self.saved] for _ in range(self.steps.blocks)]
        grad = body.param(self.hidden)
        left: list[Value] = []
        reduced: tuple[Value, ...] = ()
        for block in reversed(range(self.steps.blocks)):
            ends = self._is_first and not block
            ids = saved[block][2:]
            if ids and reduced:
                (grad,), reduced = body.part((grad, *reduced), [self.hidden]), ()
                left += (grad,) if splits else ()
            types: list[ValueType] = [self.hidden] * bool(reduced)
            types += [UnitType()] if ends else [self.summand, *[self.inner] * splits]
            operands = (*saved[block], body.transfer(grad, self.taken, ids), *reduced)
            made = body.part(operands, types)
            if reduced:
                grad = made.pop(0)
                left += (grad,) if splits else ()
            if ends:
                body.finish(made)
                return
            left += made[1:]
            reduced = (body.transfer(made[0], self.hidden, ids),)
        body.finish((*body.part((grad, *reduced), (self.hidden,)), *left))

    def _declare_weight(self, name: str) -> None:
        """A part for each block, from the last one on."""
        body = _Body(self, name, Effect.ACCUMULATE)
        blocks = self.steps.blocks
        saved = [[body.param(type_) for type_ in self.saved] for _ in range(blocks)]
        grad = body.param(self.hidden)
        done: list[Value] = []
        for block in reversed(range(blocks)):
            if block < blocks - 1:
                grad = body.param(self.hidden)
            inner = body.param(self.inner)
            operands = (*saved[block], body.transfer(grad, self.taken, saved[block][2:]), inner)
            done = body.part(operands, (UnitType(),))
        body.finish(done)

    def declare_loss(self) -> None:
        """The loss of the last stage: a sum over what its ranks have."""
        scalar = self._type((), ())
        types = (self.hidden, self.hidden)
        for name, saved in (("loss", ()), ("loss.fwd", types[:1])):
            body = _Body(self, name, Effect.PURE)
            operands = [body.param(type_) for type_ in types]
            total, *rest = body.part(operands, (self._type((), (), self._rows), *saved))
            body.finish((body.transfer(total, scalar), *rest))
        self.function("loss.bwd", (self.hidden, scalar), (self.hidden,), Effect.PURE)
        name = f"{self.actor}.loss"
        self.module.vjps[f"{name}.vjp"] = Vjp(
            f"{name}.vjp", f"{name}.fwd", f"{name}.bwd", (0,), (0,)
        )

    def _declare_reduction(self) -> None:
        shape = (self.steps.weights,)
        # What only reads need not follow what accumulates.
        body = _Body(self, "reduce_gradients", Effect.WRITE)
        (summed,) = body.part((), (self._type(shape, (self._tp,), self._dp),))
        made = body.transfer(summed, self._type(shape, (self._tp,)))
        body.finish(body.part((made,), (UnitType(),)))

    def function(
        self,
        name: str,
        inputs: Sequence[ValueType],
        outputs: Sequence[ValueType],
        effect: Effect,
        kind: FunctionKind = FunctionKind.GRAPH,
    ) -> None:
        """Declare one of the actor."""
        name = f"{self.actor}.{name}"
        types = tuple(inputs), tuple(outputs)
        self.module.functions[name] = Function(name, *types, kind, effect, self.actor)


class _Body:
    """The body of a method while it is written; its parts are named after it, and numbered."""

    def __init__(self, stage: _Stage, name: str, effect: Effect) -> None:
        self._stage = stage
        self._name = name
        self._effect = effect
        self._program = Program(f"{stage.actor}.{name}")
        self._values = 0
        self._parts = 0

    def param(self, type_: TensorType) -> Value:
        """One more input of the method."""
        value = self._value(type_)
        self._program.params.append(value)
        return value

    def part(self, operands: Sequence[Value], types: Sequence[ValueType]) -> list[Value]:
        """A call of one more part, and what it makes."""
        name = f"{self._name}.{self._parts}"
        self._parts += 1
        inputs = [_plain(value) for value in operands]
        self._stage.function(name, inputs, types, self._effect)
        made = [self._value(type_) for type_ in types]
        fn = Symbol(f"{self._stage.actor}.{name}")
        self._program.ops.append(Call(tuple(operands), tuple(made), fn=fn))
        return made

    def transfer(self, value: Value, type_: TensorType, ids: Sequence[Value] = ()) -> Value:
        """The value in another layout, or as it is; with ids, rows of experts may be enough."""
        if value.type == type_:
            return value
        made = self._value(type_)
        routed = {"experts": self._stage.experts, "lead": 2} if ids else {}
        self._program.ops.append(Transfer((value, *ids), (made,), **routed))
        return made

    def finish(self, results: Sequence[Value]) -> None:
        """Return these, and declare the method."""
        program = self._program
        program.ops.append(Return(tuple(results), ()))
        types = [_plain(value) for value in program.params], [_plain(value) for value in results]
        self._stage.function(self._name, *types, self._effect, FunctionKind.PROGRAM)
        self._stage.module.bodies[program.name] = program

    def _value(self, type_: ValueType) -> Value:
        self._values += 1
        return Value(f"v{self._values}", type_)


def _plain(value: Value) -> ValueType:
    assert not isinstance(value.type, FutureType), "nothing is promised before messages are"
    return value.type
