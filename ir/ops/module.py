"""Functions, channels, programs and modules, which make up a step in every phase."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..attributes import NO_SHARES, Effect, Shares, Traffic
from ..flops import NO_FLOPS, Flops
from ..location import Location
from ..phases import Phase
from ..types import Mesh, Place, ValueType
from . import Op, Return, Value
from .compare import equal


class FunctionKind(enum.Enum):
    """The kind of body that a function has.

    GRAPH is a traced torch.fx graph. OPAQUE is a Python method that runs without being traced.
    BUILTIN is one of the few functions that every backend provides (`builtins.py`). PROGRAM is a
    program of the module (`Module.bodies`); the pass `inline` replaces its calls by its ops. HOST
    is code of the host that hands over the memory of an actor's state, and keeps no operand; it
    alone takes and gives tensors in a host's memory (`host_state.py`). With a `parameter`, it gives
    the memory where that rests, which is the same each time.
    """

    GRAPH = "graph"
    OPAQUE = "opaque"
    BUILTIN = "builtin"
    PROGRAM = "program"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Function:
    """The declaration of a function; its body lives outside the IR, unless it is a program.

    Attributes:
        name: unique in the module, without the `@`.
        inputs, outputs: types without places.
        kind: the kind of its body.
        effect: its effect on the state of `actor`.
        actor: the actor whose state it touches, or None for a function of values alone.
        random: whether it draws random numbers; its calls then carry a `key`.
        aliases: pairs (output, input) that may share storage.
        loc: where the user defined it.
        fuse: the compiler that compiles its graph as a whole, if any.
        adds_products: whether matrix products that are gradients add themselves to `.grad`.
        flops: the floating-point operations of a call: those of its matrix products, convolutions
            and attention; empty also where they are not known.
        workspace: the bytes that a call holds at its peak beside its operands and results, without
            what single operators take inside, and without gradients that are products and add
            themselves to `.grad` (`fuse-accumulation`); 0 also where it is not known.
        shares: its effects on state that other actors of the rank hold as well.
        ranks: in scheduled modules, the ranks of its actor if there are several.
        body: the function whose body it runs, at shapes of its own; None: it has its own body.
        parameter: the path of the stored parameter that it only hands over, None of all other
            functions. Such a function reads the parameter at rest, makes it whole from the gathered
            pieces, lays its gradient out to be reduced, or adds to its gradient.
        buckets: the buckets of its actor's gradients that it adds to or reduces. Empty stands for
            bucket 0, which has all gradients that are in no other bucket.
        offloads: indices of outputs that the user wants in the host's memory while nothing uses
            them, ascending (`cg.offload`).
        resting: the bytes in the host's memory that it needs on the device (`store="host"`): of an
            opaque function, those of its actor's state that it may change; of one that reads a
            parameter at rest, those of the parameter.
        once: whether a step calls it once for all its uses, as long as nothing changes its actor's
            parameters; it reads them, and takes nothing but results of such functions.
        checks: whether it checks what it takes, so that a call stays though nothing uses it.
    """

    name: str
    inputs: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]
    kind: FunctionKind = FunctionKind.GRAPH
    effect: Effect = Effect.PURE
    actor: str | None = None
    random: bool = False
    aliases: tuple[tuple[int, int], ...] = ()
    loc: Location | None = field(default=None, compare=False)
    fuse: str | None = None
    adds_products: bool = False
    flops: Flops = NO_FLOPS
    workspace: int = 0
    shares: Shares = NO_SHARES
    ranks: tuple[int, ...] = ()
    body: str | None = None
    parameter: str | None = None
    buckets: tuple[int, ...] = ()
    offloads: tuple[int, ...] = ()
    once: bool = False
    resting: int = 0
    checks: bool = False

    @property
    def is_work(self) -> bool:
        """True if it does an actor's work, and does not just hand over a parameter or gradient."""
        hands_over = self.parameter is not None or self.effect is Effect.REDUCE or self.once
        return self.actor is not None and not hands_over and self.kind is not FunctionKind.HOST

    @property
    def body_name(self) -> str:
        """The name under which its body is found."""
        return self.name if self.body is None else self.body

    @property
    def touches(self) -> tuple[tuple[str | None, Effect], ...]:
        """The states that it touches, by name, with its effect on each.

        These are the state of its actor, by the actor's name, and state that this actor shares with
        another, by both names.
        """
        own = (self.actor, self.effect)
        if not self.shares:
            return (own,)
        pairs = [
            ("&".join(sorted((self.actor or "", sharer))), effect)
            for sharer, effect in self.shares.effects
        ]
        return (own, *pairs)

    def conflicts_with(self, other: Function) -> bool:
        """True if calls of this function and of another one must keep their program order."""
        if self.actor == other.actor and self._is_apart_from(other):
            return False
        other_effects = dict(other.touches)
        return any(
            name in other_effects and effect.conflicts_with(other_effects[name])
            for name, effect in self.touches
        )

    def _is_apart_from(self, other: Function) -> bool:
        """True if both work on gradients alone, and have no bucket in common."""
        if not (self.effect.is_on_gradients and other.effect.is_on_gradients):
            return False
        return set(self.gradient_buckets).isdisjoint(other.gradient_buckets)

    @property
    def gradient_buckets(self) -> tuple[int, ...]:
        """The buckets that it works on, if its effect is on gradients."""
        return self.buckets or (0,)


@dataclass(frozen=True, slots=True)
class Vjp:
    """The derivative of a function, as two functions of the module.

    `forward` takes the function's inputs and returns its outputs followed by the saved values.
    `backward` takes the saved values, then the cotangents of `grad_outputs`. It returns the
    cotangents of `grad_inputs`, or `unit` if there are none, and accumulates the gradients of the
    actor's parameters itself.

    A backward may also come in two halves, for schedules that put off the second. `input` has the
    inputs of `backward`; it returns the cotangents of `grad_inputs`, then values for `weight`.
    `weight` takes the inputs of `backward` that `kept` lists, then these values, and returns
    `unit`. Both halves may accumulate gradients, but never of the same parameter. If there are no
    `grad_inputs`, there is no `input`, and `weight` is `backward`. If no work can be put off, there
    is neither.

    Attributes:
        name: unique in the module, without the `@`.
        forward, backward: names of functions.
        grad_outputs: indices of the outputs whose cotangents `backward` takes, ascending.
        grad_inputs: indices of the inputs whose cotangents `backward` returns, ascending.
        input, weight: names of functions, if there are halves.
        kept: indices of the inputs of `backward` that `weight` takes, ascending.
    """

    name: str
    forward: str
    backward: str
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]
    input: str | None = None
    weight: str | None = None
    kept: tuple[int, ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of all its functions, each once."""
        names = (self.forward, self.backward, self.input, self.weight)
        return tuple(dict.fromkeys(name for name in names if name is not None))


HOST_NAMES = (None, "cpu", "mpi")
"""The values of `via` that stand for the transport between hosts."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A communicator of the plan: one for each directed edge, one for each collective group.

    Messages of a channel match in order: the n-th send with the n-th receive.

    Attributes:
        id: the number that ops have as their `chan`.
        ranks: (source, destination), or the group of a collective.
        collective: whether it serves a group.
        via: the name of its transport; None: the transport that carries every value.
        why: the reason for that transport, in words.
        traffic: the purpose of what it carries, if that has communicators of its own.
        slots: the number of buffers that the receiver keeps, once planned.
        slot_bytes: the bytes of each slot, once planned. Without slots, the bytes of the largest
            message that is received into a buffer of the program; 0 if there is none.
    """

    id: int
    ranks: tuple[int, ...]
    collective: bool = False
    via: str | None = None
    slots: int | None = None
    slot_bytes: int | None = None
    why: str | None = None
    traffic: Traffic | None = None

    @property
    def is_by_host(self) -> bool:
        """True if its messages go from host to host, and not from device to device."""
        return self.via in HOST_NAMES


@dataclass(eq=False, slots=True)
class Program:
    """A straight line of ops that ends in `return`.

    In the scheduled phase `rank` is set, and names the program. Before that phase it is None, and
    the program spans all ranks.
    """

    name: str
    params: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    rank: int | None = None

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The operands of the closing `return`."""
        if not self.ops or not isinstance(self.ops[-1], Return):
            raise ValueError(f"program @{self.name} does not end in return")
        return self.ops[-1].operands


@dataclass(eq=False, slots=True)
class Module:
    """A step on its way from trace to schedule.

    Attributes:
        name: the step's name.
        phase: how far it has come.
        world: the number of ranks.
        meshes: the meshes that its types refer to, by name.
        functions, vjps: declarations by name.
        bodies: the programs of functions of kind PROGRAM, by the function's name. Their types have
            no places: a body runs where it is called.
        channels: communicators by id; empty before ASYNC.
        programs: one over all ranks before SCHEDULED, and one for each rank in SCHEDULED. Those of
            a plan in a text are read when they are asked for (`ir/text/stored_programs.py`).

    Modules are equal if their text forms are equal, without locations (`ir/ops/compare.py`).
    """

    name: str
    phase: Phase
    world: int
    meshes: dict[str, Mesh] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    vjps: dict[str, Vjp] = field(default_factory=dict)
    bodies: dict[str, Program] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)
    programs: Sequence[Program] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return equal(self, other) if isinstance(other, Module) else NotImplemented

    @property
    def program(self) -> Program:
        """The one program of a module that is not scheduled yet."""
        if self.phase is Phase.SCHEDULED:
            raise ValueError(f"module @{self.name} is scheduled: ask for program_of(rank)")
        (program,) = self.programs
        return program

    def program_of(self, rank: int) -> Program:
        """The program of one rank of a scheduled module.

        Raises:
            ValueError: the module is not scheduled, or has no such rank.
        """
        if self.phase is not Phase.SCHEDULED:
            raise ValueError(f"module @{self.name} is not scheduled yet")
        likely = self.programs[rank : rank + 1] if rank >= 0 else ()  # they mostly stand by rank
        for program in itertools.chain(likely, self.programs):
            if program.rank == rank:
                return program
        raise ValueError(f"module @{self.name} has no program for rank {rank} of {self.world}")

    @property
    def everywhere(self) -> Place:
        """The place of all ranks."""
        return Place(tuple(range(self.world)))
