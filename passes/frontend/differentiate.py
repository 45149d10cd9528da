"""Replace `backward` by calls of the derivatives that the tracer has made.

The tracer has recorded and cut them (`tracer/method/joint.py`, `tracer/graph/autodiff`); here the
calls of them are placed, with the sums of cotangents.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from ...ir.attributes import Action, Symbol, Task
from ...ir.ops import Backward, Call, Op, Value
from ...ir.ops.module import Module, Program, Vjp
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.text.diagnostics import Diagnostic, IRError, error
from ...ir.types import UnitType, relocate
from ..base import Pass
from .adjoints import pull_back
from .cotangents import Cotangents


@dataclass(frozen=True)
class Differentiate(Pass):
    """Derive the backward of each `backward` op by reverse accumulation over calls.

    Each call on the way to a loss becomes a call of its derivative's forward, which also returns
    the saved values. The `backward` op becomes the calls of the derivatives' backwards, in reverse
    order of the forwards, as in eager PyTorch. The cotangents of a value are summed on the ranks
    that made them, and these sums are added where the value was made, so that each rank's sum
    crosses ranks once. New ops belong to the microbatch of the op that they derive, and the
    backward of a call belongs to the call's stage.

    With `split_backward`, the backward of a call in a stage becomes two calls if its derivative has
    halves. The task B computes the cotangents that an earlier stage waits for. The task W, which
    may run any time later, computes gradients of parameters that no other op needs::

        %h.grad, %l.left.0 = call(%l.saved.0, %l.grad) {fn = @stage1.loss.b, task = 1B0} : ...
        %l.done = call(%l.left.0) {fn = @stage1.loss.w, task = 1W0} : unit@1

    Before::

        %h = call(%x) {fn = @stage0.forward, mb = 0, vjp = @stage0.forward.vjp} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0, vjp = @stage1.loss.vjp} : f32[]@1
        backward(%l)

    After::

        %h, %h.saved.0 = call(%x) {fn = @stage0.forward.fwd, mb = 0} : f32[2,8]@0, f32[2,8]@0
        %l, %l.saved.0 = call(%h) {fn = @stage1.loss.fwd, mb = 0} : f32[]@1, f32[2,8]@1
        %l.grad = constant() {fill = 1.0, mb = 0} : f32[]@1
        %h.grad = call(%l.saved.0, %l.grad) {fn = @stage1.loss.bwd, mb = 0} : f32[2,8]@1
        %h.done = call(%h.saved.0, %h.grad) {fn = @stage0.forward.bwd, mb = 0} : unit@0

    Attributes:
        split_backward: whether the schedule has tasks W.
        whole: the ranks whose backwards stay whole all the same, with `+` between them.
    """

    split_backward: bool = False
    whole: str = ""

    name: ClassVar[str] = "differentiate"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def __post_init__(self) -> None:
        if self.whole and not all(map(str.isdecimal, self.whole.split("+"))):
            raise ValueError(f"whole has ranks with + between them, not {self.whole!r}")

    def run(self, module: Module) -> bool:
        program = module.program
        changed = bool(module.vjps)
        whole = frozenset(map(int, self.whole.split("+"))) if self.whole else frozenset()
        tape = _ProgramTape(module, program, self.split_backward, whole)
        ops: list[Op] = []
        for op in program.ops:
            if isinstance(op, Backward):
                ops += tape.backward(op)
                changed = True
            else:
                tape.record(op)
                ops.append(op)
        program.ops[:] = ops
        return _forget(module) or changed


def _forget(module: Module) -> bool:
    """Drop the derivatives of calls that no loss depends on."""
    unused = [op for op in module.program.ops if isinstance(op, Call) and op.vjp is not None]
    for op in unused:
        op.vjp = None
    module.vjps.clear()
    return bool(unused)


class _ProgramTape:
    """The ops so far through which gradients can flow, like the tape of autograd."""

    def __init__(
        self, module: Module, program: Program, split: bool, whole: frozenset[int]
    ) -> None:
        self._module = module
        self._program = program
        self._split, self._whole = split, whole
        self._names = Names.of(program)
        self._makers: dict[Value, int] = {}
        self._ops: list[Op] = []
        self._spent: dict[int, Backward] = {}

    def record(self, op: Op) -> None:
        """Note an op ahead of the next backward."""
        if isinstance(op, Call):
            outputs = () if op.vjp is None else self._module.vjps[op.vjp.name].grad_outputs
            through = [op.results[index] for index in outputs]
        elif any(value in self._makers for value in op.operands):
            through = list(op.results)
        else:
            return
        self._makers.update(dict.fromkeys(through, len(self._ops)))
        self._ops.append(op)

    def backward(self, op: Backward) -> list[Op]:
        """The ops that replace a `backward`."""
        cotangents = Cotangents(self._module, self._names)
        heap: list[int] = []
        for loss in op.operands:
            maker = self._ops[self._maker_of_loss(op, loss)]
            cotangents.add(loss, cotangents.fill(loss, 1.0, loss.type.place, maker))
            cotangents.ops[-1].loc = op.loc
            self._reach(loss, heap)
        last = None
        # The latest op first: by then all users of its results have added their cotangents.
        while heap:
            index = -heappop(heap)
            if index == last:
                continue
            last = index
            for primal, cotangent in self._pull_back(index, op, cotangents):
                cotangents.add(primal, cotangent)
                self._reach(primal, heap)
        return cotangents.ops

    def _reach(self, value: Value, heap: list[int]) -> None:
        heappush(heap, -self._makers[value])

    def _maker_of_loss(self, op: Backward, loss: Value) -> int:
        if loss not in self._makers:
            raise error(
                f"the loss '{loss.name}' does not depend on anything that has gradients",
                op=op,
                program=self._program,
                value=loss,
                help="compute it from actors whose parameters require gradients",
            )
        return self._makers[loss]

    def _pull_back(
        self, index: int, backward: Backward, cotangents: Cotangents
    ) -> list[tuple[Value, Value]]:
        op = self._ops[index]
        if not isinstance(op, Call):
            pairs = pull_back(op, self._program, cotangents)
            return [pair for pair in pairs if pair[0] in self._makers]
        self._spend(index, backward)
        assert op.vjp is not None, "only calls with a derivative are on the tape"
        return self._pull_back_call(op, self._module.vjps[op.vjp.name], cotangents)

    def _spend(self, index: int, backward: Backward) -> None:
        earlier = self._spent.setdefault(index, backward)
        if earlier is not backward:
            raise error(
                "two backwards go through the same call; what it saved is used up by the first",
                op=self._ops[index],
                program=self._program,
                help="add the losses up and call cg.backward once",
                notes=(
                    Diagnostic("the first backward", op=earlier),
                    Diagnostic("the second backward", op=backward),
                ),
            )

    def _pull_back_call(
        self, op: Call, vjp: Vjp, cotangents: Cotangents
    ) -> list[tuple[Value, Value]]:
        self._check_masks(op, vjp, cotangents)
        saved = self._save(op, vjp)
        incoming = tuple(cotangents.total(op.results[i], op) for i in vjp.grad_outputs)
        operands = saved + incoming
        primals = [op.operands[i] for i in vjp.grad_inputs]
        name, task = vjp.backward, op.task and op.task.beside(Action.BACKWARD)
        deferred = vjp.weight if self._splits(op) else None
        left: tuple[Value, ...] = ()
        results: tuple[Value, ...] = ()
        if deferred is not None:
            name = vjp.input or ""
        if name:
            call = self._derived(op, name, operands, task, primals)
            cotangents.ops.append(call)
            results, left = call.results[: len(primals)], call.results[len(primals) :]
        if deferred is not None:
            assert op.task is not None, "only a stage has a task to put work off to"
            inputs, task = (
                tuple(operands[i] for i in vjp.kept) + left,
                op.task.beside(Action.WEIGHT),
            )
            cotangents.ops.append(self._derived(op, deferred, inputs, task, []))
        return list(zip(primals, results, strict=True))

    def _splits(self, op: Call) -> bool:
        """True if the backward of a call has tasks B and W."""
        if not self._split or op.task is None:
            return False
        return op.place is None or self._whole.isdisjoint(op.place.ranks)

    def _derived(
        self,
        op: Call,
        name: str,
        operands: tuple[Value, ...],
        task: Task | None,
        primals: list[Value],
    ) -> Call:
        """A call of a derivative's function whose first results are the gradients of `primals`."""
        types = self._module.functions[name].outputs
        base = op.results[0].name
        names = [f"{primal.name}.grad" for primal in primals]
        # If a result is a unit, it says that the parameters have their gradients.
        names += [
            f"{base}.done" if isinstance(type_, UnitType) else f"{base}.left.{number}"
            for number, type_ in enumerate(types[len(primals) :])
        ]
        results = tuple(
            Value(self._names.fresh(name), relocate(type_, op.place))
            for name, type_ in zip(names, types, strict=True)
        )
        return Call(operands, results, fn=Symbol(name), loc=op.loc, mb=op.mb, task=task)

    def _save(self, op: Call, vjp: Vjp) -> tuple[Value, ...]:
        """Make a call save the values that its backward needs, and return them."""
        types = self._module.functions[vjp.forward].outputs[len(op.results) :]
        saved = tuple(
            Value(
                self._names.fresh(f"{op.results[0].name}.saved.{number}"),
                relocate(type_, op.place),
            )
            for number, type_ in enumerate(types)
        )
        op.fn, op.vjp, op.results = Symbol(vjp.forward), None, op.results + saved
        return saved

    def _check_masks(self, op: Call, vjp: Vjp, cotangents: Cotangents) -> None:
        """Check that the gradients which the tracer has declared are those that flow."""
        for i in vjp.grad_outputs:
            if not cotangents.has(op.results[i]):
                raise self._wrong_mask(op, vjp, op.results[i], "takes the gradient of")
        for i in vjp.grad_inputs:
            if op.operands[i] not in self._makers:
                raise self._wrong_mask(op, vjp, op.operands[i], "gives a gradient to")

    def _wrong_mask(self, op: Call, vjp: Vjp, value: Value, verb: str) -> IRError:
        return error(
            f"internal error: the derivative @{vjp.name} {verb} '{value.name}', "
            "through which no gradient flows",
            op=op,
            program=self._program,
            value=value,
            help="grad_outputs and grad_inputs of a vjp must be exact; this is an error in what "
            "wrote them, the tracer or the module's text",
        )
