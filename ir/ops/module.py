"""Functions, channels, programs and modules: what a step is made of, in every phase."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..attributes import NO_SHARES, Effect, Shares, Traffic
from ..flops import NO_FLOPS, Flops
from ..location import Location
from ..phases import Phase
from ..types import Mesh, Place, ValueType
from . import Op, Return, Value
from .compare import equal


class FunctionKind(enum.Enum):
    """The kind of body that a function's name stands for.

    GRAPH is a traced torch.fx graph. OPAQUE is a Python method that is called as it is. BUILTIN
    is one of the few functions that every backend knows and passes may call (`builtins.py`).
    PROGRAM is a program of the module (`Module.bodies`), which `inline` puts in the place of calls.
    """

    GRAPH = "graph"
    OPAQUE = "opaque"
    BUILTIN = "builtin"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class Function:
    """The declaration of a function; its body lives outside the IR, unless it is a program.

    Attributes:
        name: unique in the module, without the `@`.
        inputs, outputs: types without places.
        kind: what stands behind the name.
        effect: what it does to the state of `actor`.
        actor: the actor whose state it touches, or None for a function of values alone.
        random: whether it draws random numbers; its calls then carry a `key`.
        aliases: pairs (output, input) that may share storage.
        loc: where the user defined it.
        fuse: what compiles its graph as a whole, if anything does.
        adds_products: whether gradients that are matrix products are added to `.grad` by the
            product itself.
        flops: floating-point operations of a call, those of matrix products, convolutions and
            attention; none as well where nothing is known of them.
        shares: what it does to state that other actors of the rank hold as well.
        ranks: in scheduled modules, the ranks that its actor is on where these are several.
        body: the function whose body it has, at shapes of its own; None: a body of its own name.
        parameter: the parameter of its actor, by path, that it does nothing to but hand it over: it
            reads it as it rests, makes it whole of what was gathered, lays a gradient of it out to
            be reduced, or adds to its gradient; None of all others.
        buckets: of its actor's gradients, those that it adds to or that it reduces; none: the first
            one, 0, which has all gradients that are in no other.
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
    shares: Shares = NO_SHARES
    ranks: tuple[int, ...] = ()
    body: str | None = None
    parameter: str | None = None
    buckets: tuple[int, ...] = ()

    @property
    def is_work(self) -> bool:
        """True if it does work of an actor, and not only hands a parameter or a gradient over."""
        hands_over = self.parameter is not None or self.effect is Effect.REDUCE
        return self.actor is not None and not hands_over

    @property
    def body_name(self) -> str:
        """The name under which its body is found."""
        return self.name if self.body is None else self.body

    @property
    def touches(self) -> tuple[tuple[str | None, Effect], ...]:
        """The state that it touches, by name, and how: its actor's, and what that shares.

        What two actors share has a name made of theirs.
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
        """True if a call of this function and one of another must keep their program order."""
        if self.actor == other.actor and self._is_apart_from(other):
            return False
        other_effects = dict(other.touches)
        return any(
            name in other_effects and effect.conflicts_with(other_effects[name])
            for name, effect in self.touches
        )

    def _is_apart_from(self, other: Function) -> bool:
        """True if both work on nothing but gradients, and on no bucket together."""
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
    `backward` takes the saved values, then the cotangents of `grad_outputs`, and returns the
    cotangents of `grad_inputs` (or `unit`, where there are none); the gradients of the actor's
    parameters it accumulates itself.

    A backward may also come in two halves, for schedules that put off the second. `input` takes
    what `backward` takes, and returns the cotangents of `grad_inputs`, then values that it leaves
    to `weight`. `weight` takes those inputs of `backward` that `kept` names, then these values, and
    returns `unit`. Both may accumulate gradients, each of other parameters. Where nobody waits for
    a cotangent, there is no `input`, and `weight` is `backward`. Where nothing can be put off there
    is neither.

    Attributes:
        name: unique in the module, without the `@`.
        forward, backward: names of functions.
        grad_outputs: indices of the outputs whose cotangents `backward` takes, ascending.
        grad_inputs: indices of the inputs whose cotangents `backward` returns, ascending.
        input, weight: names of functions, where there are halves.
        kept: indices of inputs of `backward` that `weight` takes, ascending.
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
"""The transport between hosts by its names in `via`."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A communicator of the plan: one for each directed edge, one for each collective group.

    Messages of a channel match in order: the n-th send with the n-th receive.

    Attributes:
        id: what `chan` of an op refers to.
        ranks: (source, destination), or the group of a collective.
        collective: whether it serves a group.
        via: its transport by name; None for what the run time has for every value.
        why: why that transport, in words.
        traffic: what its collectives are for, if they have communicators of their own.
        slots: buffers that the receiver keeps, once planned.
        slot_bytes: bytes of each, once planned. Without slots, of the largest message that comes
            into a buffer of the program; 0 where there is none.
        background: floating-point operations that a rank does while a receive of the channel waits,
            in the mean of its messages; None where it computes nothing meanwhile.
    """

    id: int
    ranks: tuple[int, ...]
    collective: bool = False
    via: str | None = None
    slots: int | None = None
    slot_bytes: int | None = None
    why: str | None = None
    background: Flops | None = None
    traffic: Traffic | None = None

    @property
    def is_by_host(self) -> bool:
        """True if its messages go from host to host, and not by what joins devices."""
        return self.via in HOST_NAMES


@dataclass(eq=False, slots=True)
class Program:
    """A straight line of ops that ends in `return`.

    `rank` is set in the scheduled phase, and names the program there; before it the program spans
    all ranks.
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
        world: number of ranks.
        meshes: those that types name, by name.
        functions, vjps: declarations by name.
        bodies: the programs of functions of kind PROGRAM, by the function's name. Their types have
            no places: a body runs where it is called.
        channels: communicators by id; empty before ASYNC.
        programs: one over all ranks before SCHEDULED, one for each rank from then on.

    Modules are equal when their text forms are, locations aside (`text/compare.py`).
    """

    name: str
    phase: Phase
    world: int
    meshes: dict[str, Mesh] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    vjps: dict[str, Vjp] = field(default_factory=dict)
    bodies: dict[str, Program] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)

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
        for program in self.programs:
            if program.rank == rank:
                return program
        raise ValueError(f"module @{self.name} has no program for rank {rank} of {self.world}")

    @property
    def everywhere(self) -> Place:
        """The place of all ranks."""
        return Place(tuple(range(self.world)))
