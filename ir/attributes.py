"""Attribute types that ops carry beside numbers, strings and places."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class FastEnum(enum.Enum):
    """An enumeration whose members hash as objects; `Enum` hashes their names, in Python."""

    __hash__ = object.__hash__


class Effect(FastEnum):
    """The effect of a function on the state of its actor.

    PURE touches no state. READ reads it. ACCUMULATE adds to the actor's gradients, and reads
    nothing that an UPDATE changes: such calls commute with all but REDUCE and WRITE. REDUCE takes
    gradients that have been added up, or puts others in their place, and touches nothing else: it
    commutes with READ and UPDATE, and with what works on other buckets of gradients
    (`Function.buckets`). UPDATE reads state and changes some of it that no backward reads, as batch
    norm does with its statistics: it keeps its program order against READ, UPDATE and WRITE. WRITE
    may do anything: it keeps its program order against every other call on the actor.
    """

    PURE = "pure"
    READ = "read"
    ACCUMULATE = "accumulate"
    REDUCE = "reduce"
    UPDATE = "update"
    WRITE = "write"

    @property
    def changes_state(self) -> bool:
        """True if a call may leave state behind that later calls read; gradients aside."""
        return self in (Effect.UPDATE, Effect.WRITE)

    def conflicts_with(self, other: Effect) -> bool:
        """True if two calls on one actor with these effects must keep their program order.

        Where both work on gradients, these are of one bucket.
        """
        pair = (self, other)
        if Effect.PURE in pair:
            return False
        if Effect.WRITE in pair:
            return True
        if self.is_on_gradients or other.is_on_gradients:
            both = self.is_on_gradients and other.is_on_gradients
            return both and Effect.REDUCE in pair
        return Effect.UPDATE in pair

    @property
    def is_on_gradients(self) -> bool:
        """True if it changes or takes gradients, and no other state that changes."""
        return self in (Effect.ACCUMULATE, Effect.REDUCE)


@dataclass(frozen=True, slots=True)
class Shares:
    """The effects of a function on state that its actor shares with others of its rank.

    Attributes:
        effects: pairs of another actor and the effect on what both hold, by name.
    """

    effects: tuple[tuple[str, Effect], ...] = ()

    @staticmethod
    def of(effects: Mapping[str, Effect]) -> Shares:
        """The effects on what is shared with each of some actors."""
        return Shares(tuple(sorted(effects.items(), key=lambda pair: pair[0])))

    def __bool__(self) -> bool:
        """True if any state is shared."""
        return bool(self.effects)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{actor}: {effect.value}" for actor, effect in self.effects) + "}"


NO_SHARES = Shares()


class Stream(FastEnum):
    """An in-order queue of a rank: work on one stream never overtakes itself.

    GATHER and REDUCE take the collectives of parameters that are stored in pieces, and those of
    gradients, beside all other collectives.
    MESSAGE takes both directions of a transport that does a rank's messages one after the other.
    COPY takes the copies between a device and its host that are part of messages by way of hosts.
    TAIL takes the tails of programs (the pass `split-tails`), whose ops are on it in place of
    COMPUTE. No op of a program names these two.
    """

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    MESSAGE = "message"
    COLLECTIVE = "collective"
    GATHER = "gather"
    REDUCE = "reduce"
    COPY = "copy"
    TAIL = "tail"


COMMUNICATION_STREAMS: Final = frozenset(
    {
        *(Stream.SEND, Stream.RECV, Stream.MESSAGE),
        *(Stream.COLLECTIVE, Stream.GATHER, Stream.REDUCE),
    }
)
"""The streams of sends, receives and collectives, which are not over when the next op begins."""


MAIN: Final = 0
"""The number of the graph that is a program which its device runs as a whole, its tail aside."""

TAIL: Final = 1
"""The number of the graph that is the tail of such a program."""


class Traffic(enum.Enum):
    """What collectives beside those of a step's work are for; each has communicators of its own.

    GATHER brings parameters that are stored in pieces to those who use them. REDUCE adds up
    gradients: of such parameters, or of those whose gradients come in several buckets.
    """

    GATHER = "gather"
    REDUCE = "reduce"

    @property
    def stream(self) -> Stream:
        """The stream of its collectives."""
        return Stream.GATHER if self is Traffic.GATHER else Stream.REDUCE


class ReduceOp(enum.Enum):
    """The operation by which a reducing collective combines the values of its group."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"


class Action(FastEnum):
    """The action of a task of a pipeline schedule.

    F is the forward. B is the backward: the whole of it, or, where a schedule splits the
    backward, the gradient of the inputs only, the gradient of the weights then being W.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One cell of a pipeline schedule: `2F0` is the forward of microbatch 0 on stage 2."""

    stage: int
    action: Action
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action.value}{self.microbatch}"

    def beside(self, action: Action) -> Task:
        """The task of the same stage and microbatch that does `action`."""
        return Task(self.stage, action, self.microbatch)

    @staticmethod
    def parse(text: str) -> Task:
        """Read the form that `str()` writes.

        Raises:
            ValueError: `text` is not of that form.
        """
        match = _TASK.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not a task; write stage, F|B|W, microbatch, as in 2F0")
        stage, action, microbatch = match.groups()
        return Task(int(stage), Action(action), int(microbatch))


_TASK = re.compile(r"(\d+)([FBW])(\d+)")


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a function, vjp or constant of the module: `@stage0.forward`."""

    name: str

    def __str__(self) -> str:
        return f"@{self.name}"
