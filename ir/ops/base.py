"""Values, and the base class of ops with the declarations of an op class."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from ..attributes import Stream, Task
from ..location import Location
from ..phases import Phase
from ..types import Place, Type
from .rules import CheckContext, Problem


class Value:
    """One SSA value: a name, unique in its program, and a type."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: Type) -> None:
        self.name = name
        self.type = type

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class DerivedValue(Value):
    """A value that a pass has added to a rank's program, and named after another one of it.

    So the pass need not run for ranks whose programs are alike: there the value is named after
    the other one's name at the rank.

    Attributes:
        source: the value that it is named after.
        suffix: what its name has behind that of the source.
    """

    __slots__ = ("source", "suffix")

    def __init__(self, name: str, type: Type, source: Value, suffix: str) -> None:
        super().__init__(name, type)
        self.source = source
        self.suffix = suffix


class Adjoint(enum.Enum):
    """The way in which an op's operands get their cotangents from those of its results.

    SAME: each operand gets the cotangent of the result. TRAVELS: the same, and the cotangent takes
    the transport of the value. PART: each operand gets the part of the result's cotangent that
    belongs to it. TRANSPOSE: another collective brings the cotangents back.
    """

    SAME = enum.auto()
    TRAVELS = enum.auto()
    PART = enum.auto()
    TRANSPOSE = enum.auto()


@dataclass(eq=False, slots=True)
class Op:
    """An operation of a program; every op has these attributes.

    Attributes:
        operands: the values that it takes.
        results: the values that it makes.
        loc: the user's line that it comes from, if any.
        mb: the microbatch that it belongs to, if any.
        task: the task of the pipeline schedule that it belongs to, once that is known.
        stream: the stream that it runs on, once that is assigned.
        graph: the number of the device graph that it belongs to, if any: a part of a rank's
            program that a device may record and replay as a whole.

    An op class also declares:
        opcode: its name in the text form.
        takes, gives: its operands and results in words, for the reference.
        phases: the phases that admit it.
        remedy: the pass that makes or replaces it, if some phases do not admit it.
        brings_operands: whether `insert-transfers` brings its operands to where it runs. Before
            that pass, its operands may be at any place.
        shares_operand: whether its result may share the storage of its first operand. An op with
            another rule overrides `shared_operand`.
        takes_layouts: whether its operands and results may be laid out.
        takes_summands: whether they may be summands, too.
        streams: the streams that it may be on.
        synchronizes: whether ranks wait for each other at it; such an op is never moved or dropped.
        adjoint: how gradients flow through it; None if they do not.
        gradient_help: the advice of the error where they do not.
    """

    operands: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    loc: Location | None = field(default=None, kw_only=True)
    mb: int | None = field(default=None, kw_only=True)
    task: Task | None = field(default=None, kw_only=True)
    stream: Stream | None = field(default=None, kw_only=True)
    graph: int | None = field(default=None, kw_only=True)

    opcode: ClassVar[str] = "op"
    takes: ClassVar[str] = ""
    gives: ClassVar[str] = ""
    phases: ClassVar[frozenset[Phase]] = frozenset(Phase)
    remedy: ClassVar[str] = ""
    brings_operands: ClassVar[bool] = False
    shares_operand: ClassVar[bool] = False
    takes_layouts: ClassVar[bool] = False
    takes_summands: ClassVar[bool] = False
    streams: ClassVar[frozenset[Stream]] = frozenset({Stream.COMPUTE})
    synchronizes: ClassVar[bool] = False
    adjoint: ClassVar[Adjoint | None] = None
    gradient_help: ClassVar[str] = "take this value out of the loss"

    @property
    def result(self) -> Value:
        """The one result."""
        (result,) = self.results
        return result

    @property
    def shared_operand(self) -> Value | None:
        """The operand whose storage the result may share, if there is one."""
        return self.operands[0] if self.shares_operand and self.operands else None

    @property
    def place(self) -> Place | None:
        """The place of the op in a program over all ranks: that of its results, or its operands.

        An op that runs on more ranks than these (`transfer`, the collectives) overrides it.
        """
        for values in (self.results, self.operands):
            for value in values:
                if (place := value.type.place) is not None:
                    return place
        return None

    @property
    def operand_places(self) -> tuple[Place | None, ...]:
        """For each operand the place at which the op takes it: the op's own place."""
        return (self.place,) * len(self.operands)

    def check(self, context: CheckContext) -> None:
        """Check operands, results and attributes, but not places.

        Raises:
            Problem: the first problem that is found.
        """

    def check_places(self, context: CheckContext) -> None:
        """Check that the results are at the op's place.

        Raises:
            Problem: a result is elsewhere.
        """
        place = self.place
        for value in self.results[1:]:
            if value.type.place != place:
                raise Problem(
                    f"%{value.name} is at {value.type.place}, the op runs at {place}", "", value
                )

    def check_operand_places(self, context: CheckContext) -> None:
        """Check that each operand is at every rank that takes it.

        Raises:
            Problem: an operand is missing at a rank.
        """
        if self.brings_operands and context.phase is Phase.TRACED:
            return
        for value, place in zip(self.operands, self.operand_places, strict=True):
            at = value.type.place
            if place is not None and at is not place and at is not None and not at.covers(place):
                raise Problem(
                    f"%{value.name} is at {at}, but {self.opcode} runs at {place}",
                    "insert-transfers brings values to where they are used",
                    value,
                )
