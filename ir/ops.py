"""The ops: one small class each, its dataclass fields being its attributes.

An op has operands and results, which are values, and attributes, which are typed fields of its
class. The printer, the parser and the verifier are driven by these classes, so a new op is a new
class here and its rules in `phases.py` and `verifier.py`, and nothing else.

Ops are plain data. Passes make new ops and new op lists; nothing keeps use lists behind the
scenes. Values and ops compare by identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .attributes import ReduceOp, Stream, Symbol, Task
from .location import Location
from .types import Place, Type


class Value:
    """One SSA value: a name, unique in its program, and a type."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: Type) -> None:
        self.name = name
        self.type = type

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False, slots=True)
class Op:
    """What every op has.

    Attributes:
        operands: values it takes.
        results: values it makes.
        loc: the user's line that asked for it, if any.
        mb: the microbatch it belongs to, if any.
        task: the cell of the pipeline schedule it belongs to, once that is known.
        stream: the stream it runs on, once that is assigned.
        graph: the part of a rank's program that it belongs to and that a device may record and
            replay as a whole, if it belongs to one.
    """

    operands: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    loc: Location | None = field(default=None, kw_only=True)
    mb: int | None = field(default=None, kw_only=True)
    task: Task | None = field(default=None, kw_only=True)
    stream: Stream | None = field(default=None, kw_only=True)
    graph: int | None = field(default=None, kw_only=True)

    opcode: ClassVar[str] = "op"

    @property
    def result(self) -> Value:
        """The one result."""
        (result,) = self.results
        return result

    @property
    def place(self) -> Place | None:
        """Where the op runs in a program over all ranks: the place of what it makes or takes.

        An op that runs on more ranks than that (`transfer`, the collectives) overrides it.
        """
        for value in (*self.results, *self.operands):
            if value.type.place is not None:
                return value.type.place
        return None


def _union(values: Iterable[Value]) -> Place | None:
    ranks: dict[int, None] = {}
    for value in values:
        if value.type.place is not None:
            ranks.update(dict.fromkeys(value.type.place.ranks))
    return Place(tuple(ranks)) if ranks else None


@dataclass(eq=False, slots=True)
class Constant(Op):
    """A value known when the step was traced.

    `fill` is the element of a constant tensor; `ref` names an entry of the step's constants.
    Exactly one of the two is set.
    """

    opcode: ClassVar[str] = "constant"
    fill: float | int | bool | None = field(default=None, kw_only=True)
    ref: Symbol | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class Call(Op):
    """Run a function of the module on its operands.

    `vjp` names the derivative that `differentiate` will use; `key` distinguishes the random
    numbers of this call from those of every other call of the step.
    """

    opcode: ClassVar[str] = "call"
    fn: Symbol = field(default=Symbol(""), kw_only=True)
    vjp: Symbol | None = field(default=None, kw_only=True)
    key: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class View(Op):
    """A part of a tensor that shares its storage: `length` entries of `dim` from `start`."""

    opcode: ClassVar[str] = "view"
    dim: int = field(default=0, kw_only=True)
    start: int = field(default=0, kw_only=True)
    length: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class Copy(Op):
    """The same value in storage of its own."""

    opcode: ClassVar[str] = "copy"


@dataclass(eq=False, slots=True)
class Transfer(Op):
    """Bring a value to another place; `via` names the transport, and `why` says why that one.

    Without `via` it is what the run time has for every value. Before PLACED a transfer goes from a
    place to the same place: it says how its operand is to travel to those who use the result.
    """

    opcode: ClassVar[str] = "transfer"
    via: str | None = field(default=None, kw_only=True)
    why: str | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        return _union((*self.operands, *self.results))


@dataclass(eq=False, slots=True)
class Send(Op):
    """Start sending the operand to `peer`; the future says that the operand is free again.

    `seq` counts the messages of channel `chan` within one execution. `slot` is the buffer of the
    channel that carries the message, once `plan-buffers` has chosen it. A send and a receive with
    the same `batch` are one operation, at both of their ends: neither waits for the other.
    """

    opcode: ClassVar[str] = "send"
    chan: int = field(default=0, kw_only=True)
    peer: int = field(default=0, kw_only=True)
    seq: int = field(default=0, kw_only=True)
    slot: int | None = field(default=None, kw_only=True)
    batch: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class Recv(Op):
    """Start receiving from `peer`; takes the buffer to receive into, or none. See `send`."""

    opcode: ClassVar[str] = "recv"
    chan: int = field(default=0, kw_only=True)
    peer: int = field(default=0, kw_only=True)
    seq: int = field(default=0, kw_only=True)
    slot: int | None = field(default=None, kw_only=True)
    batch: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class Collective(Op):
    """What the collectives share: a group of ranks that all take part, in one order.

    In a program over all ranks the operands are the group's values, one for each rank of the
    group in group order (for `broadcast`: the root's alone, for `barrier`: none); in a rank's
    program there is that rank's operand only. A program over all ranks gets one result at the
    whole group or, where the ranks get different parts (`reduce_scatter`, `all_to_all`), one for
    each rank, in group order. From ASYNC on results are futures, and `chan` and `seq` are set;
    they are as in `send`. `via` and `why` are as in `transfer`.
    """

    group: Place = field(default=Place((0,)), kw_only=True)
    chan: int | None = field(default=None, kw_only=True)
    seq: int | None = field(default=None, kw_only=True)
    via: str | None = field(default=None, kw_only=True)
    why: str | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        return self.group


@dataclass(eq=False, slots=True)
class AllReduce(Collective):
    """Combine the group's tensors elementwise; every rank gets the result."""

    opcode: ClassVar[str] = "all_reduce"
    op: ReduceOp = field(default=ReduceOp.SUM, kw_only=True)


@dataclass(eq=False, slots=True)
class AllGather(Collective):
    """Concatenate the group's tensors along `dim`; every rank gets the result."""

    opcode: ClassVar[str] = "all_gather"
    dim: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class ReduceScatter(Collective):
    """Combine the group's tensors, then give each rank its part of `dim`."""

    opcode: ClassVar[str] = "reduce_scatter"
    op: ReduceOp = field(default=ReduceOp.SUM, kw_only=True)
    dim: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class AllToAll(Collective):
    """Rank i gives its j-th part of `dim` to rank j and concatenates what it gets."""

    opcode: ClassVar[str] = "all_to_all"
    dim: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class Broadcast(Collective):
    """Give the value of rank `root` to every rank of the group."""

    opcode: ClassVar[str] = "broadcast"
    root: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class Barrier(Collective):
    """No rank of the group goes on before all have come here."""

    opcode: ClassVar[str] = "barrier"


@dataclass(eq=False, slots=True)
class Wait(Op):
    """Make a future's value, or a value of another stream, available on this op's stream."""

    opcode: ClassVar[str] = "wait"


@dataclass(eq=False, slots=True)
class Alloc(Op):
    """Uninitialised storage at byte `offset` of the rank's arena."""

    opcode: ClassVar[str] = "alloc"
    offset: int = field(default=0, kw_only=True)


@dataclass(eq=False, slots=True)
class Free(Op):
    """Give back the storage of the first operand; the others are what had to happen before."""

    opcode: ClassVar[str] = "free"


@dataclass(eq=False, slots=True)
class Backward(Op):
    """Ask for the gradients of the operands, scalars each; gone after `differentiate`."""

    opcode: ClassVar[str] = "backward"


@dataclass(eq=False, slots=True)
class Return(Op):
    """The outputs of the program; always its last op.

    `at` is where a program over all ranks delivers them: each rank of `at` returns them all, the
    other ranks return nothing.
    """

    opcode: ClassVar[str] = "return"
    at: Place | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        return self.at


OP_CLASSES: dict[str, type[Op]] = {
    cls.opcode: cls
    for cls in (
        Constant,
        Call,
        View,
        Copy,
        Transfer,
        Send,
        Recv,
        AllReduce,
        AllGather,
        ReduceScatter,
        AllToAll,
        Broadcast,
        Barrier,
        Wait,
        Alloc,
        Free,
        Backward,
        Return,
    )
}


def batch_of(op: Op) -> int | None:
    """The batch that an op is in, if it is a message that is in one."""
    return op.batch if isinstance(op, Send | Recv) else None


_STRUCTURE = frozenset({"operands", "results", "loc"})


def attribute_names(cls: type[Op]) -> tuple[str, ...]:
    """Names of an op class's attributes in the order of the text form (sorted)."""
    return _ATTRIBUTE_NAMES[cls]


_ATTRIBUTE_NAMES: dict[type[Op], tuple[str, ...]] = {
    cls: tuple(sorted(f.name for f in fields(cls) if f.name not in _STRUCTURE))
    for cls in OP_CLASSES.values()
}


def attributes(op: Op) -> dict[str, Any]:
    """The attributes of an op that are set, by name, sorted."""
    found = ((name, getattr(op, name)) for name in _ATTRIBUTE_NAMES[type(op)])
    return {name: value for name, value in found if value is not None}
