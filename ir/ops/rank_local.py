"""Ops of one rank: constants, calls, views, storage, and the end of a program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ..attributes import COMMUNICATION_STREAMS, HOST_STREAMS, Stream, Symbol
from ..phases import Phase
from ..types import DType, Place, TensorType, UnitType, promised
from .base import Adjoint, Op, Value
from .rules import (
    CheckContext,
    Problem,
    bare,
    check_ranks,
    expect_operands,
    expect_results,
    expect_signature,
    expect_tensor,
    expect_type,
    resized,
    transferred,
)

if TYPE_CHECKING:
    from .module import Function, Module


@dataclass(eq=False, slots=True)
class Constant(Op):
    """A value that is known when the step is traced.

    `fill` is the value of all elements of a tensor; `ref` names an entry of the step's constants.
    Exactly one of the two is set.
    """

    opcode: ClassVar[str] = "constant"
    takes: ClassVar[str] = "none"
    gives: ClassVar[str] = "one; a tensor if `fill` is given"
    takes_layouts: ClassVar[bool] = True
    fill: float | int | bool | None = field(default=None, kw_only=True)
    ref: Symbol | None = field(default=None, kw_only=True)

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 0, "no operand")
        expect_results(self, 1, "one result")
        if (self.fill is None) == (self.ref is None):
            choice = "neither fill nor ref" if self.fill is None else "both fill and ref"
            raise Problem(f"constant has {choice}", "give exactly one of the two")
        if self.fill is not None:
            expect_tensor(self.result, self)
        elif isinstance(self.result.type, TensorType) and self.result.type.layout is not None:
            raise Problem(
                f"%{self.result.name} is a constant by name, and laid out",
                "give every rank a copy, and lay it out by a transfer",
            )


@dataclass(eq=False, slots=True)
class Call(Op):
    """Run a function of the module on its operands.

    `vjp` names the derivative for the pass `differentiate`. `key` makes the random numbers of this
    call differ from those of all other calls of the step.
    """

    opcode: ClassVar[str] = "call"
    takes: ClassVar[str] = "the function's inputs"
    gives: ClassVar[str] = "the function's outputs"
    brings_operands: ClassVar[bool] = True
    takes_layouts: ClassVar[bool] = True
    takes_summands: ClassVar[bool] = True
    fn: Symbol = field(default=Symbol(""), kw_only=True)
    vjp: Symbol | None = field(default=None, kw_only=True)
    key: int | None = field(default=None, kw_only=True)

    def check(self, context: CheckContext) -> None:
        function = context.module.functions.get(self.fn.name)
        if function is None:
            raise Problem(
                f"call of {self.fn}, which the module does not declare",
                f"declare it: function {self.fn}(...) -> (...)",
            )
        expect_signature(self.operands, function.inputs, f"{self.fn} takes", "input")
        expect_signature(self.results, function.outputs, f"{self.fn} returns", "output")
        if function.random and self.key is None:
            raise Problem(
                f"{self.fn} draws random numbers, and this call has no key",
                "give each call of a random function its own key = 0, 1, ...",
            )
        if self.vjp is not None and (function.name, self.vjp.name) not in context.checked:
            _check_vjp(self, self.vjp, function, context.module)
            context.checked.add((function.name, self.vjp.name))

    def check_places(self, context: CheckContext) -> None:
        if self.place is None:
            raise Problem(
                "a call with neither operands nor results is at no place",
                "let the function return unit, and give its result a place",
            )
        Op.check_places(self, context)


def _check_vjp(op: Call, name: Symbol, function: Function, module: Module) -> None:
    vjp = module.vjps.get(name.name)
    if vjp is None:
        raise Problem(f"the module does not declare vjp {name}", f"declare it: vjp {name} {{}}")
    forward = module.functions.get(vjp.forward)
    if forward is None:
        return  # reported where the vjp is declared
    outputs = forward.outputs[: len(function.outputs)]
    if forward.inputs != function.inputs or outputs != function.outputs:
        raise Problem(
            f"the forward of vjp {name}, @{forward.name}, does not fit {op.fn}",
            f"it must take {op.fn}'s inputs and return its outputs, then the saved values",
        )


@dataclass(eq=False, slots=True)
class View(Op):
    """A part of a tensor that shares its storage: `length` entries along `dim` from `start`.

    Other dimensions may be cut, and stay cut.
    """

    opcode: ClassVar[str] = "view"
    takes: ClassVar[str] = "a tensor"
    gives: ClassVar[str] = "the tensor with `length` entries in `dim`"
    shares_operand: ClassVar[bool] = True
    takes_layouts: ClassVar[bool] = True
    gradient_help: ClassVar[str] = (
        "split inputs of the step into microbatches, or slice the value with a torch operation"
    )
    dim: int = field(default=0, kw_only=True)
    start: int = field(default=0, kw_only=True)
    length: int = field(default=0, kw_only=True)

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 1, "one operand")
        expect_results(self, 1, "one result")
        type_ = expect_tensor(self.operands[0], self)
        dims = len(type_.shape)
        if not 0 <= self.dim < dims:
            raise Problem(f"view of dimension {self.dim} of {bare(type_)}, which has {dims}")
        size, end = type_.shape[self.dim], self.start + self.length
        if min(self.start, self.length) < 0 or end > size:
            raise Problem(f"view of entries {self.start}..{end} of a dimension of {size}")
        if type_.layout is not None and type_.layout.cuts[self.dim]:
            whole = transferred(self.operands[0], replace(type_, layout=None))
            raise Problem(
                f"view of dimension {self.dim} of {bare(type_)}, which is cut",
                f"make it whole first: {whole}",
                self.operands[0],
            )
        expected = replace(resized(type_, self.dim, self.length), layout=type_.layout)
        expect_type(self.result, expected, "this view makes")


@dataclass(eq=False, slots=True)
class Copy(Op):
    """A copy of a value in storage of its own or, in a rank's program, in a buffer."""

    opcode: ClassVar[str] = "copy"
    takes: ClassVar[str] = "a value, and the buffer to copy it into, or none"
    gives: ClassVar[str] = "a value of the same type"
    adjoint: ClassVar[Adjoint | None] = Adjoint.SAME
    takes_layouts: ClassVar[bool] = True

    @property
    def buffer(self) -> Value | None:
        """The buffer to copy into; None if the copy has storage of its own."""
        return self.operands[1] if len(self.operands) > 1 else None

    @property
    def shared_operand(self) -> Value | None:
        return self.buffer

    def check(self, context: CheckContext) -> None:
        if self.buffer is None or context.phase is not Phase.SCHEDULED:
            check_unchanged(self)  # only a rank's program has buffers
            return
        expect_operands(self, 2, "a value, and a buffer or none")
        expect_results(self, 1, "one result")
        expect_tensor(self.operands[0], self)
        expect_type(self.buffer, self.operands[0].type, "a copy into it has")
        expect_type(self.result, self.operands[0].type, f"{self.opcode} keeps the operand's type,")


def check_unchanged(op: Op) -> None:
    """Raise unless an op has one operand, and one result of the same type."""
    expect_operands(op, 1, "one operand")
    expect_results(op, 1, "one result")
    expect_type(op.result, op.operands[0].type, f"{op.opcode} keeps the operand's type,")


@dataclass(eq=False, slots=True)
class Wait(Op):
    """Make the value of a future, or a value of another stream, available on this op's stream."""

    opcode: ClassVar[str] = "wait"
    takes: ClassVar[str] = "a future, or a value of another stream"
    gives: ClassVar[str] = "the value; none is needed for a unit"
    shares_operand: ClassVar[bool] = True
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.ASYNC, Phase.SCHEDULED})
    streams: ClassVar[frozenset[Stream]] = Op.streams | COMMUNICATION_STREAMS | HOST_STREAMS
    remedy: ClassVar[str] = "split-transfers makes it"

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 1, "one operand")
        value = promised(self.operands[0].type)
        if isinstance(value, UnitType) and not self.results:
            return
        expect_results(self, 1, "one result")
        expect_type(self.result, value, "the wait gives")


@dataclass(eq=False, slots=True)
class Alloc(Op):
    """Uninitialised storage at byte `offset` of the rank's arena."""

    opcode: ClassVar[str] = "alloc"
    takes: ClassVar[str] = "none"
    gives: ClassVar[str] = "a tensor"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.SCHEDULED})
    remedy: ClassVar[str] = "no pass makes it; it is written by hand, in scheduled programs"
    streams: ClassVar[frozenset[Stream]] = Op.streams | COMMUNICATION_STREAMS
    offset: int = field(default=0, kw_only=True)

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 0, "no operand")
        expect_results(self, 1, "one result")
        expect_tensor(self.result, self)
        if self.offset < 0:
            raise Problem(f"alloc at the negative offset {self.offset}")


@dataclass(eq=False, slots=True)
class Free(Op):
    """Give back the storage of the first operand, after the other operands are there."""

    opcode: ClassVar[str] = "free"
    takes: ClassVar[str] = "the storage, then whatever has to have happened"
    gives: ClassVar[str] = "none"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.SCHEDULED})
    remedy: ClassVar[str] = "plan-buffers makes it, in scheduled programs"

    def check(self, context: CheckContext) -> None:
        if not self.operands:
            raise Problem("free takes the storage to give back, here it has no operand")
        expect_results(self, 0, "no result")
        if isinstance(self.operands[0].type, UnitType):
            raise Problem("free of a unit, which has no storage", "", self.operands[0])


@dataclass(eq=False, slots=True)
class Backward(Op):
    """Ask for the gradients of the operands, which are scalars; `differentiate` replaces it."""

    opcode: ClassVar[str] = "backward"
    takes: ClassVar[str] = "one or more real floating scalars"
    gives: ClassVar[str] = "none"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.TRACED})
    remedy: ClassVar[str] = "differentiate replaces it with the derivative's calls"
    brings_operands: ClassVar[bool] = True

    def check(self, context: CheckContext) -> None:
        expect_results(self, 0, "no result")
        if not self.operands:
            raise Problem("backward takes at least one loss, here it has none")
        for value in self.operands:
            type_ = expect_tensor(value, self)
            if type_.shape or not type_.dtype.is_differentiable or type_.dtype in _COMPLEX:
                raise Problem(
                    f"backward takes real floating scalars, %{value.name} is {bare(type_)}",
                    "reduce the loss to a scalar, by .mean() or .sum(), first",
                    value,
                )


_COMPLEX = (DType.C64, DType.C128)


@dataclass(eq=False, slots=True)
class Return(Op):
    """Return the outputs of the program; always its last op.

    `at` is the place where a program over all ranks delivers its outputs: each rank of `at` returns
    all of them, and the other ranks return nothing.
    """

    opcode: ClassVar[str] = "return"
    takes: ClassVar[str] = "the outputs"
    gives: ClassVar[str] = "none"
    brings_operands: ClassVar[bool] = True
    at: Place | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        return self.at

    def check(self, context: CheckContext) -> None:
        expect_results(self, 0, "no result")
        if self.at is not None and context.phase is Phase.SCHEDULED:
            raise Problem(
                "a rank's program returns to its own rank",
                "leave out `at`; a rank that delivers nothing has an empty return",
            )

    def check_places(self, context: CheckContext) -> None:
        if self.at is not None:
            check_ranks(self.at, context.module, "return")
