"""What each op demands of its operands, results and attributes.

One function for each op class, in `RULES`. A rule raises `Problem` about the first thing that is
wrong; `verifier.py` turns it into a diagnostic. Rules may rely on the phase's table of legal ops.
Places of operands and results, which are the same matter for most ops, are `place_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..module import Function, Module, Phase, Program
from ..ops import (
    AllGather,
    Alloc,
    AllReduce,
    AllToAll,
    Backward,
    Barrier,
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
    Transfer,
    Value,
    View,
    Wait,
)
from ..phases import has_futures
from ..types import DType, FutureType, TensorType, Type, UnitType, relocate


class Problem(Exception):
    """Something is wrong with an op; `value` is the operand or result that shows it."""

    def __init__(self, message: str, help: str = "", value: Value | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.value = value


@dataclass(frozen=True)
class Context:
    """Where the op that is checked stands."""

    module: Module
    program: Program
    checked: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of function and vjp that are known to fit."""

    @property
    def phase(self) -> Phase:
        return self.module.phase


def same_but_place(a: Type, b: Type) -> bool:
    """Whether two types are equal, places aside."""
    if a is b:
        return True
    if type(a) is TensorType and type(b) is TensorType:
        return a.dtype is b.dtype and a.shape == b.shape
    if isinstance(a, FutureType) and isinstance(b, FutureType):
        return same_but_place(a.value, b.value)
    return type(a) is type(b) and not isinstance(a, TensorType | FutureType)


def bare(type_: Type) -> str:
    """The text of a type without its place."""
    return str(relocate(type_, None))


def _operands(op: Op, count: int, what: str) -> None:
    if len(op.operands) != count:
        raise Problem(f"{op.opcode} takes {what}, here it has {len(op.operands)}")


def _results(op: Op, count: int, what: str) -> None:
    if len(op.results) != count:
        raise Problem(f"{op.opcode} makes {what}, here it has {len(op.results)}")


def _expect(value: Value, expected: Type, why: str) -> None:
    if not same_but_place(value.type, expected):
        raise Problem(f"%{value.name} is {bare(value.type)}, but {why} {bare(expected)}", "", value)


def _tensor(value: Value, op: Op) -> TensorType:
    type_ = value.type
    if not isinstance(type_, TensorType):
        raise Problem(f"{op.opcode} works on tensors, %{value.name} is {bare(type_)}", "", value)
    return type_


def _constant(op: Constant, context: Context) -> None:
    _operands(op, 0, "no operand")
    _results(op, 1, "one result")
    if (op.fill is None) == (op.ref is None):
        given = "neither fill nor ref" if op.fill is None else "both fill and ref"
        raise Problem(f"constant has {given}", "give exactly one of the two")
    if op.fill is not None:
        _tensor(op.result, op)


def _call(op: Call, context: Context) -> None:
    functions = context.module.functions
    function = functions.get(op.fn.name)
    if function is None:
        raise Problem(
            f"call of {op.fn}, which the module does not declare",
            f"declare it: function {op.fn}(...) -> (...)",
        )
    _signature(op.operands, function.inputs, f"{op.fn} takes", "input")
    _signature(op.results, function.outputs, f"{op.fn} returns", "output")
    if function.random and op.key is None:
        raise Problem(
            f"{op.fn} draws random numbers, and this call has no key",
            "give each call of a random function its own key = 0, 1, ...",
        )
    if op.vjp is not None and (function.name, op.vjp.name) not in context.checked:
        _call_vjp(op, function, context.module)
        context.checked.add((function.name, op.vjp.name))


def _signature(values: Sequence[Value], types: Sequence[Type], what: str, noun: str) -> None:
    if len(values) != len(types):
        raise Problem(f"{what} {len(types)} {noun}s, this call has {len(values)}")
    for index, (value, type_) in enumerate(zip(values, types, strict=True)):
        _expect(value, type_, f"{what} as {noun} {index}")


def _call_vjp(op: Call, function: Function, module: Module) -> None:
    assert op.vjp is not None
    vjp = module.vjps.get(op.vjp.name)
    if vjp is None:
        raise Problem(f"the module does not declare vjp {op.vjp}", f"declare it: vjp {op.vjp} {{}}")
    forward = module.functions.get(vjp.forward)
    if forward is None:
        return  # reported where the vjp is declared
    outputs = forward.outputs[: len(function.outputs)]
    if forward.inputs != function.inputs or outputs != function.outputs:
        raise Problem(
            f"the forward of vjp {op.vjp}, @{forward.name}, does not fit {op.fn}",
            f"it must take {op.fn}'s inputs and return its outputs, then the saved values",
        )


def _view(op: View, context: Context) -> None:
    _operands(op, 1, "one operand")
    _results(op, 1, "one result")
    type_ = _tensor(op.operands[0], op)
    if not 0 <= op.dim < len(type_.shape):
        raise Problem(f"view of dimension {op.dim} of {bare(type_)}, which has {len(type_.shape)}")
    size, end = type_.shape[op.dim], op.start + op.length
    if min(op.start, op.length) < 0 or end > size:
        raise Problem(f"view of entries {op.start}..{end} of a dimension of {size}")
    _expect(op.result, _resized(type_, op.dim, op.length), "this view makes")


def _resized(type_: TensorType, dim: int, size: int) -> TensorType:
    return TensorType(type_.dtype, (*type_.shape[:dim], size, *type_.shape[dim + 1 :]))


def _unchanged(op: Copy | Transfer, context: Context) -> None:
    _operands(op, 1, "one operand")
    _results(op, 1, "one result")
    _expect(op.result, op.operands[0].type, f"{op.opcode} keeps the operand's type,")


def _transfer(op: Transfer, context: Context) -> None:
    _unchanged(op, context)
    if context.phase is not Phase.TRACED:
        return
    if op.result.type.place != op.operands[0].type.place or op.via is None:
        raise Problem(
            "a transfer in phase traced only says how its operand travels to where the result is "
            "used, so it stays where it is and names a transport",
            f"write {{via = ...}}, and {op.operands[0].type}; insert-transfers makes the others",
        )


def _send(op: Send, context: Context) -> None:
    _operands(op, 1, "one operand")
    _results(op, 1, "one result, future<unit>")
    _expect(op.result, FutureType(UnitType()), "send makes")


def _recv(op: Recv, context: Context) -> None:
    if len(op.operands) > 1:
        raise Problem(f"recv takes one buffer or none, here it has {len(op.operands)}")
    _results(op, 1, "one result, a future")
    promised = _future(op.result, op)
    if op.operands:
        _expect(op.operands[0], promised, "a receive into it promises")


def _future(value: Value, op: Op) -> Type:
    if not isinstance(value.type, FutureType):
        raise Problem(
            f"{op.opcode} makes a future, %{value.name} is {bare(value.type)}",
            f"write future<{bare(value.type)}>, and wait for it",
            value,
        )
    return value.type.value


def _wait(op: Wait, context: Context) -> None:
    _operands(op, 1, "one operand")
    type_ = op.operands[0].type
    value = type_.value if isinstance(type_, FutureType) else type_
    if isinstance(value, UnitType) and not op.results:
        return
    _results(op, 1, "one result")
    _expect(op.result, value, "the wait gives")


def _alloc(op: Alloc, context: Context) -> None:
    _operands(op, 0, "no operand")
    _results(op, 1, "one result")
    _tensor(op.result, op)
    if op.offset < 0:
        raise Problem(f"alloc at the negative offset {op.offset}")


def _free(op: Free, context: Context) -> None:
    if not op.operands:
        raise Problem("free takes the storage to give back, here it has no operand")
    _results(op, 0, "no result")
    if isinstance(op.operands[0].type, UnitType):
        raise Problem("free of a unit, which has no storage", "", op.operands[0])


def _backward(op: Backward, context: Context) -> None:
    _results(op, 0, "no result")
    if not op.operands:
        raise Problem("backward takes at least one loss, here it has none")
    for value in op.operands:
        type_ = _tensor(value, op)
        if type_.shape or not type_.dtype.is_differentiable or type_.dtype in _COMPLEX:
            raise Problem(
                f"backward takes real floating scalars, %{value.name} is {bare(type_)}",
                "reduce the loss to a scalar, by .mean() or .sum(), first",
                value,
            )


_COMPLEX = (DType.C64, DType.C128)


def _return(op: Return, context: Context) -> None:
    _results(op, 0, "no result")
    if op.at is not None and context.phase is Phase.SCHEDULED:
        raise Problem(
            "a rank's program returns to its own rank",
            "leave out `at`; a rank that delivers nothing has an empty return",
        )


def _collective(op: Collective, context: Context) -> None:
    """How many operands and results a collective has, and of which types."""
    one_rank = context.phase is Phase.SCHEDULED
    members = len(op.group.ranks)
    if isinstance(op, Barrier):
        _operands(op, 0, "no operand")
    elif isinstance(op, Broadcast):
        if op.root not in op.group:
            raise Problem(f"broadcast from rank {op.root}, which is not of the group {op.group}")
        here = not one_rank or context.program.rank == op.root
        _operands(op, int(here), "one operand, on the root's rank alone")
    else:
        _operands(op, 1 if one_rank else members, "one operand for each rank of the program")
    scattered = isinstance(op, ReduceScatter | AllToAll) and not one_rank
    _results(op, members if scattered else 1, "one result (scattered: one for each rank)")
    made = [_future(v, op) if has_futures(context.phase) else v.type for v in op.results]
    expected = _collective_type(op, made[0])
    for value, type_ in zip(op.results, made, strict=True):
        if not same_but_place(type_, expected):
            raise Problem(f"this {op.opcode} makes {bare(expected)}, not {bare(type_)}", "", value)


def _collective_type(op: Collective, made: Type) -> Type:
    """The type that each rank gets; `made` where the operands do not say."""
    if isinstance(op, Barrier):
        return UnitType()
    if not op.operands:
        return made
    first = op.operands[0]
    if isinstance(op, Broadcast):
        return first.type
    type_ = _tensor(first, op)
    for value in op.operands[1:]:
        _expect(value, type_, f"the {op.opcode} has, from another rank,")
    if isinstance(op, AllReduce):
        return type_
    assert isinstance(op, AllGather | ReduceScatter | AllToAll)
    members = len(op.group.ranks)
    if not 0 <= op.dim < len(type_.shape):
        raise Problem(f"{op.opcode} along dimension {op.dim} of {bare(type_)}", "", first)
    size = type_.shape[op.dim]
    if isinstance(op, AllGather):
        return _resized(type_, op.dim, size * members)
    if size % members:
        raise Problem(
            f"{op.opcode} divides dimension {op.dim}, of {size}, among {members} ranks",
            f"make it a multiple of {members}",
            first,
        )
    return type_ if isinstance(op, AllToAll) else _resized(type_, op.dim, size // members)


RULES: dict[type[Op], Callable[[Any, Context], None]] = {
    Constant: _constant,
    Call: _call,
    View: _view,
    Copy: _unchanged,
    Transfer: _transfer,
    Send: _send,
    Recv: _recv,
    AllReduce: _collective,
    AllGather: _collective,
    ReduceScatter: _collective,
    AllToAll: _collective,
    Broadcast: _collective,
    Barrier: _collective,
    Wait: _wait,
    Alloc: _alloc,
    Free: _free,
    Backward: _backward,
    Return: _return,
}
