"""Problems of ops, the context of a check, and checks that op classes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..phases import Phase
from ..types import FutureType, Place, TensorType, Type, relocate

if TYPE_CHECKING:
    from .base import Op, Value
    from .module import Module, Program


class Problem(Exception):
    """An op breaks a rule; `value` is the operand or result that shows it, if any."""

    def __init__(self, message: str, help: str = "", value: Value | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.value = value


@dataclass(frozen=True)
class CheckContext:
    """The module and the program of an op to check."""

    module: Module
    program: Program
    checked: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of a function and a vjp that are known to fit."""

    @property
    def phase(self) -> Phase:
        return self.module.phase


def same_but_place(a: Type, b: Type) -> bool:
    """True if two types are equal, whatever their places."""
    if a is b:
        return True
    if type(a) is TensorType and type(b) is TensorType:
        is_alike = a.dtype is b.dtype and a.shape == b.shape and a.space is b.space
        return is_alike and a.layout == b.layout
    if isinstance(a, FutureType) and isinstance(b, FutureType):
        return same_but_place(a.value, b.value)
    return type(a) is type(b) and not isinstance(a, TensorType | FutureType)


def same_but_layout(a: Type, b: Type) -> bool:
    """True if both types are of tensors of one shape and element type, whatever their layouts."""
    if not (isinstance(a, TensorType) and isinstance(b, TensorType)):
        return False
    return a.dtype is b.dtype and a.shape == b.shape and a.space is b.space


def transferred(value: Value, type_: Type) -> str:
    """The text of a transfer that gives a value another type, at the same place."""
    return f"%y = transfer(%{value.name}) : {relocate(type_, value.type.place)}"


def bare(type_: Type) -> str:
    """The text of a type without its place."""
    return str(relocate(type_, None))


def resized(type_: TensorType, dim: int, size: int) -> TensorType:
    """The type with another size in one dimension, and without place and layout."""
    return TensorType(type_.dtype, (*type_.shape[:dim], size, *type_.shape[dim + 1 :]))


def expect_operands(op: Op, count: int, words: str) -> None:
    """Raise unless an op has `count` operands; `words` says the same in words."""
    if len(op.operands) != count:
        raise Problem(f"{op.opcode} takes {words}, here it has {len(op.operands)}")


def expect_results(op: Op, count: int, words: str) -> None:
    """Raise unless an op has `count` results; `words` says the same in words."""
    if len(op.results) != count:
        raise Problem(f"{op.opcode} makes {words}, here it has {len(op.results)}")


def expect_type(value: Value, expected: Type, why: str) -> None:
    """Raise unless a value has the expected type, whatever its place.

    The message has `why` before that type.
    """
    if not same_but_place(value.type, expected):
        message = f"%{value.name} is {bare(value.type)}, but {why} {bare(expected)}"
        help_ = ""
        if same_but_layout(value.type, expected):
            help_ = f"a transfer changes the layout: {transferred(value, expected)}"
        raise Problem(message, help_, value)


def expect_signature(values: Sequence[Value], types: Sequence[Type], words: str, noun: str) -> None:
    """Raise unless the values of a call have the types of a function's signature."""
    if len(values) != len(types):
        raise Problem(f"{words} {len(types)} {noun}s, this call has {len(values)}")
    for index, (value, type_) in enumerate(zip(values, types, strict=True)):
        if not same_but_place(value.type, type_):
            expect_type(value, type_, f"{words} as {noun} {index}")


def expect_tensor(value: Value, op: Op) -> TensorType:
    """The type of a value, which must be a tensor."""
    type_ = value.type
    if not isinstance(type_, TensorType):
        raise Problem(f"{op.opcode} works on tensors, %{value.name} is {bare(type_)}", "", value)
    return type_


def expect_future(value: Value, op: Op) -> Type:
    """The type that a value promises; the value must be a future."""
    if not isinstance(value.type, FutureType):
        raise Problem(
            f"{op.opcode} makes a future, %{value.name} is {bare(value.type)}",
            f"write future<{bare(value.type)}>, and wait for it",
            value,
        )
    return value.type.value


def check_ranks(place: Place, module: Module, subject: str, value: Value | None = None) -> None:
    """Raise unless all ranks of a place are in the world; `subject` is at the place."""
    for rank in place.ranks:
        if not 0 <= rank < module.world:
            raise Problem(
                f"{subject} is at rank {rank}, the world has {module.world}",
                f"ranks are 0..{module.world - 1}",
                value,
            )
