"""Attribute types that ops carry beside numbers, strings and places."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class FastEnum(enum.Enum):
    """An enumeration whose members hash as plain objects: `Enum` hashes names, which is slower."""

    __hash__ = object.__hash__


class Effect(FastEnum):
    """The effect of a function on the state of its actor.

    PURE touches no state. READ reads it. ACCUMULATE adds to the actor's gradients, and reads
    nothing that an UPDATE changes: such calls commute with all but REDUCE and WRITE. REDUCE takes
    accumulated gradients, or replaces them, and touches nothing else: it commutes with READ and
    UPDATE, and with calls that work on other buckets of gradients (`Function.buckets`). UPDATE
    reads state and changes a part that no backward reads and that is no parameter, such as the
    statistics of batch norm: it keeps its program order against READ, UPDATE and WRITE. WRITE may
    do anything: it keeps its program order against every other call on the actor.
    """

    PURE = "pure"
    READ = "read"
    ACCUMULATE = "accumulate"
    REDUCE = "reduce"
    UPDATE = "update"
    WRITE = "write"

    @property
    def changes_state(self) -> bool:
        """True if a call may change state, other than gradients, that later calls read."""
        return self in (Effect.UPDATE, Effect.WRITE)

    @property
    def changes_parameters(self) -> bool:
        """True if a call may change trained parameters."""
        return self is Effect.WRITE

    def conflicts_with(self, other: Effect) -> bool:
        """True if two calls on one actor with these effects must keep their program order.

        If both work on gradients, the gradients are taken to be in the same bucket.
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
        """True if it changes or takes gradients, and touches no other mutable state."""
        return self in (Effect.ACCUMULATE, Effect.REDUCE)


@dataclass(frozen=True, slots=True)
class Shares:
    """The effects of a function on state that its actor shares with other actors of its rank.

    Attributes:
        effects: pairs of another actor's name and the effect on the state that both hold, sorted
            by name.
    """

    effects: tuple[tuple[str, Effect], ...] = ()

    @staticmethod
    def of(effects: Mapping[str, Effect]) -> Shares:
        """The effects on shared state, by the name of the actor that it is shared with."""
        return Shares(tuple(sorted(effects.items(), key=lambda pair: pair[0])))

    def __bool__(self) -> bool:
        """True if any state is shared."""
        return bool(self.effects)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{actor}: {effect.value}" for actor, effect in self.effects) + "}"


NO_SHARES = Shares()


class Stream(FastEnum):
    """An in-order queue of a rank: work on one stream never overtakes itself.

    GATHER takes the collectives that gather stored parameters, and REDUCE those that reduce
    gradients; COLLECTIVE takes all others.
    MESSAGE takes the sends and receives of a transport that does a rank's messages one by one.
    COPY takes the copies between a device and its host for messages that travel by way of hosts.
    OFFLOAD takes the copies of tensors to the host, and FETCH those back: a link to a host carries
    both at once.
    TAIL takes the tails of programs (see the pass `split-tails`), whose ops name COMPUTE. No op of
    a program names COPY or TAIL.
    """

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    MESSAGE = "message"
    COLLECTIVE = "collective"
    GATHER = "gather"
    REDUCE = "reduce"
    COPY = "copy"
    OFFLOAD = "offload"
    FETCH = "fetch"
    TAIL = "tail"


COMMUNICATION_STREAMS: Final = frozenset(
    {
        *(Stream.SEND, Stream.RECV, Stream.MESSAGE),
        *(Stream.COLLECTIVE, Stream.GATHER, Stream.REDUCE),
    }
)
"""The streams of sends, receives and collectives, which may still run when the next op begins."""

HOST_STREAMS: Final = frozenset({Stream.OFFLOAD, Stream.FETCH})
"""The streams of copies between a device and its host, which may still run then, too."""


MAIN: Final = 0
"""The number of the graph of a program that its device runs as a whole, without its tail."""

TAIL: Final = 1
"""The number of the graph that is the tail of such a program."""


class Traffic(enum.Enum):
    """The purpose of collectives and messages that have communicators of their own.

    GATHER brings stored parameters to the ranks that use them. REDUCE adds up gradients: those of
    stored parameters, and those that come in several buckets. RING is of messages: blocks of keys
    and values, and their gradients, that go from rank to rank beside what the ranks compute. Ranks
    that need copies of a block gather them, as of any other value.
    """

    GATHER = "gather"
    REDUCE = "reduce"
    RING = "ring"

    @property
    def stream(self) -> Stream:
        """The stream of its collectives."""
        return _STREAMS[self]


_STREAMS = {
    Traffic.GATHER: Stream.GATHER,
    Traffic.REDUCE: Stream.REDUCE,
    Traffic.RING: Stream.COLLECTIVE,
}


class ReduceOp(enum.Enum):
    """The operation by which a reducing collective combines the values of its group."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"


class Action(FastEnum):
    """The action of a task of a pipeline schedule.

    F is the forward. B is the backward. Where a schedule splits the backward, B computes only the
    gradient of the inputs, and W the gradient of the weights.
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
        """The task of `action` for the same stage and microbatch."""
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
