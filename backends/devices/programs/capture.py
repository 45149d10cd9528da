"""Record parts of a rank's program once as graphs of the device, and replay them.

A graph reads and writes the memory that it was captured with. So a value that a segment takes from
outside is first copied into the segment's own memory, unless it has been in the same place twice in
a row. A value that methods or the caller may keep, or keep views of, is copied behind the graph. A
value that only the caller gets is not copied: it stays in the graph's memory, and while the caller
holds it, another graph of the segment is replayed. Gradients stay in a graph's memory as `.grad` of
their parameters, since an optimizer reads them there. Before each replay the segment looks which
tensors the parameters and gradients are; it has graphs for each combination that it has met.

All graphs of a stream share one pool for values that live within a replay, and any replay may
overwrite all of it. So values that outlive a replay are elsewhere. A rehearsal, a capture that is
thrown away, shows which these are. In the capture that counts, messages land in memory outside of
the pool, bodies make gradients there, and the other values are copied out at the end of the graph.
The first graph of a pool has its gradients in the pool: graphs captured later leave that memory
alone as long as somebody holds them, and the first graph is replayed only where parameters have no
gradients. So these gradients can use the memory of operands that are no longer needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ...base import Body, GraphBody, StatefulBody
from ...device import Device, DeviceGraph
from ...failures.fallbacks import Fallbacks, Refusal
from ...program.instructions import Instruction, Registers
from ..output_buffers import LentTensor, may_be_lent
from ..ports import StreamPort
from ..stream_order import StreamEvent, StreamOrder
from .captured import Captured, Interface, Outlasting
from .tensor_memory import (
    TensorLocation,
    copy_all,
    laid_out,
    layouts,
    location,
    set_gradient,
    storage,
    storages,
)

WARM_UPS = 2
"""Executions that run without graphs before one is captured: libraries make their handles then."""

STATES = 4
"""The most combinations of parameters and gradients that a segment has graphs for. With more, it
runs without graphs."""

LENDING = 2
"""Graphs whose outputs the caller may hold; if it holds those of all, outputs are copied."""

_REBINDS = Refusal(
    "it replaces buffers of an actor by new tensors", "Let the method write to them, as by copy_()."
)
_OTHERS = Refusal(
    "its parameters or gradients are other tensors each time",
    "Between steps, write to parameters, buffers and gradients in place, or set .grad to None.",
)
_TENSORS = "Let the value be a tensor, or a constant of the step."
_CAPTURABLE = (
    "A method that asks the device for a number, or moves memory of the host, can be @cg.opaque; "
    "passes='-capture' captures nothing, and says nothing of it."
)


class CapturedSegment:
    """A run of instructions as one instruction; none of them makes the host wait.

    Attributes:
        number: the `graph` of its ops.
        interface: the registers that it shares with the rest of the program.
        reason: why it runs without graphs; None if it may be replayed.
        at: the instruction that was begun last, where they run one by one; else 0.
        captures: the number of graphs captured so far.
        replays: the number of executions that replayed one.
        is_replayed: whether the last execution replayed one.
        behind: the event behind each replay, where a program has several segments; else None.
        lent: what the last execution has lent to the caller, by register.
    """

    def __init__(
        self,
        number: int,
        instructions: Sequence[Instruction],
        registers: Registers,
        interface: Interface,
        bodies: Sequence[Body],
        ports: Sequence[StreamPort],
        order: StreamOrder,
        stable: dict[int, Tensor],
        needs: Sequence[StreamEvent],
        fallbacks: Fallbacks,
        behind: StreamEvent | None = None,
    ) -> None:
        self.number = number
        self.behind = behind
        self.is_replayed = False
        self.reason: str | None = None
        self.at = 0
        self.captures = 0
        self.replays = 0
        self.lent: tuple[tuple[int, LentTensor], ...] = ()
        self._instructions = tuple(instructions)
        self._registers = registers
        self.interface = interface
        stateful_bodies = [body for body in bodies if isinstance(body, StatefulBody)]
        self._state_of = [body.state for body in stateful_bodies]
        self._trained_in = [body.trained for body in stateful_bodies]
        self._new_gradients = [b.new_gradients for b in stateful_bodies if isinstance(b, GraphBody)]
        self._ports = tuple(ports)
        self._order = order
        self._device: Device = order.device
        self._stable = stable
        self._needs = tuple(needs)
        self._graphs: dict[tuple[Any, ...], list[Captured]] = {}
        self._places: tuple[TensorLocation, ...] = ()
        self._direct: tuple[TensorLocation, ...] = ()
        self._warm = 0
        self._failed: DeviceGraph | None = None
        self._fallbacks = fallbacks
        if any(body.rebinds for body in stateful_bodies if isinstance(body, GraphBody)):
            self._stay(_REBINDS)

    def __call__(self) -> bool:
        """Put the segment's work on the streams."""
        self.at = 0
        self.is_replayed = False
        if self.reason is not None or self._warm < WARM_UPS:
            self._warm += 1
            if self.reason is None:
                self._come_again()  # inputs that stay in one place from the start need one graph
            self.run()
            return True
        trained = [p for tensors in self._trained_in for p in tensors()]
        state = [t for tensors in self._state_of for t in tensors()]
        gradients = [p.grad for p in trained]
        direct = self._come_again()
        key = (direct, *map(location, state), *map(id, gradients), *map(location, gradients))
        graphs = self._graphs.get(key)
        if graphs is None:
            if len(self._graphs) >= STATES:
                self.run()
                self._stay(_OTHERS)
                return True
            graphs = self._graphs[key] = []
        outcome: Captured | Refusal | None = None
        for captured in graphs:
            if captured.is_free():
                outcome = captured
                break
        if outcome is None:
            outcome = self._capture(trained, (*state, *gradients), gradients, graphs, direct)
        if isinstance(outcome, Refusal):
            # If this fails as well, the capture is not the cause; after a reset it is tried again.
            self.run()
            self._stay(outcome)
        else:
            self._replay(outcome, trained)
        return True

    def forget(self) -> None:
        """Drop the graphs, whose messages no longer exist."""
        self._graphs.clear()
        self._failed = None
        self._warm = 0

    def run(self) -> None:
        """Put the work on the streams without a graph, instruction by instruction."""
        self.lent = ()
        self._order.fork()
        for at, instruction in enumerate(self._instructions):
            self.at = at
            instruction()
        self.at = 0

    def _stay(self, refusal: Refusal) -> None:
        """Give up graphs for this segment, and warn with the reason."""
        self.reason = refusal.reason
        self._fallbacks.warn(self.number, refusal)

    def _come_again(self) -> bool:
        """True if all inputs are where a graph may read them in place.

        That is where they were when they first came to the same places twice in a row. So a program
        whose caller has one set of buffers copies nothing.
        """
        registers = self._registers
        places = tuple([location(registers[i]) for i in self.interface.inputs])
        if not self._direct and places == self._places:
            self._direct = places
        self._places = places
        return bool(places) and places == self._direct

    def _replay(self, captured: Captured, trained: Sequence[Tensor]) -> None:
        registers = self._registers
        for event in self._needs:
            event.wait(self._order.compute)
        for _, loan in captured.loans:
            loan.await_users(self._device, self._order.compute)
        for register, memory in captured.takes:
            value = registers[register]
            if value is not memory:
                memory.copy_(value, non_blocking=True)
        self.lent = captured.loans
        captured.graph.replay()
        self.replays += 1
        self.is_replayed = True
        copied = self.interface.copied
        for register, value in captured.gives:
            registers[register] = value.clone() if register in copied else value
        for register, loan in captured.loans:
            registers[register] = loan.out()
        for parameter, gradient in zip(trained, captured.gradients, strict=True):
            set_gradient(parameter, gradient)
        if self.behind is not None:
            self.behind.record(self._order.compute)

    def _capture(
        self,
        trained: Sequence[Tensor],
        state: tuple[Tensor | None, ...],
        gradients: Sequence[Tensor | None],
        graphs: list[Captured],
        direct: bool,
    ) -> Captured | Refusal:
        """Record the segment as a graph; a refusal if it cannot be captured."""
        registers, before = self._registers, list(self._registers)
        takes = self._take(direct)
        if isinstance(takes, Refusal):
            return takes
        taken = list(registers)
        try:
            rehearsal, outlasting = self._rehearse(trained, state)
            self._put_back(taken, trained, gradients)
            graph = self._record_all(outlasting)
            del rehearsal  # until now it has kept the pool, so that its memory serves again
        except RuntimeError as error:
            self._put_back(before, trained, gradients)
            return Refusal(f"it cannot be captured: {' '.join(str(error).split())}", _CAPTURABLE)
        self.captures += 1
        lends = len(graphs) < LENDING
        gives, loans = self._lend_storages(storages([*taken, *state]) if lends else None)
        after = tuple(parameter.grad for parameter in trained)
        # Registers get back the values that were read: the replay takes them as any replay does.
        for register in self.interface.reads:
            registers[register] = before[register]
        captured = Captured(graph, takes, gives, loans, state, after)
        graphs.append(captured)
        return captured

    def _put_back(
        self, values: Sequence[Any], trained: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        self._registers[:] = values
        for parameter, gradient in zip(trained, gradients, strict=True):
            set_gradient(parameter, gradient)

    def _rehearse(
        self, trained: Sequence[Tensor], state: tuple[Tensor | None, ...]
    ) -> tuple[DeviceGraph, Outlasting]:
        """Capture once to see what the segment leaves behind, and allocate memory for that.

        Messages are left out: dropping a graph with messages makes the library wait for all work on
        the device.
        """
        registers = self._registers
        stay = self._device.begins_pool(self._order.compute)
        rooms = ((port, port.room()) for port in self._ports)
        landings = [(port, room) for port, room in rooms if room is not None]
        outside = storages([*registers, *state])
        landed = {storage(room) for _, room in landings}
        for port in self._ports:
            port.rehearses = True
        try:
            graph = self._device.capture(
                lambda: self._record(Outlasting(tuple(landings))), self._order.compute
            )
        finally:
            for port in self._ports:
                port.rehearses = False
        values = {r: registers[r] for r in self.interface.gives}
        tensors = {r: value for r, value in values.items() if isinstance(value, Tensor)}
        used = {storage(value) for value in tensors.values()}
        inside = {
            r: value for r, value in tensors.items() if storage(value) not in outside | landed
        }
        parameters = {
            id(p): p
            for p in (() if stay else trained)
            if p.grad is not None and storage(p.grad) not in outside
        }
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        return graph, Outlasting(
            tuple((port, room) for port, room in landings if storage(room) in used),
            tuple(zip(inside, laid_out(layouts(list(inside.values()))), strict=True)),
            tuple(zip(parameters.values(), laid_out(layouts(gradients)), strict=True)),
        )

    def _take(self, direct: bool) -> tuple[tuple[int, Tensor], ...] | Refusal:
        """Put the memory that the graph is to read into the registers that it reads."""
        registers = self._registers
        takes = []
        for register in self.interface.reads:
            value = registers[register]
            if not isinstance(value, Tensor):
                type_name = type(value).__name__
                return Refusal(
                    f"it reads a value of type {type_name}, which is no tensor", _TENSORS
                )
            if direct and register in self.interface.inputs:
                continue
            memory = value if self._stable.get(register) is value else value.clone()
            registers[register] = memory
            takes.append((register, memory))
        return tuple(takes)

    def _lend_storages(
        self, outside: frozenset[int] | None
    ) -> tuple[tuple[tuple[int, Tensor], ...], tuple[tuple[int, LentTensor], ...]]:
        """The values that the graph has left in registers, and those of them that are lent.

        Args:
            outside: the storages that belong to others as well, whose tensors are not lent; None if
                nothing is lent.
        """
        registers, interface = self._registers, self.interface
        tensors = {r: v for r in interface.gives if isinstance(v := registers[r], Tensor)}
        lent = {
            register: value
            for register, value in tensors.items()
            if outside is not None
            and register in interface.lent
            and may_be_lent(value)
            and storage(value) not in outside
        }
        unlent_storages = storages(
            [value for register, value in tensors.items() if register not in lent]
        )
        loans = tuple(
            (r, LentTensor(value))
            for r, value in lent.items()
            if storage(value) not in unlent_storages
        )
        owed = {register for register, _ in loans}
        gives = tuple((r, value) for r, value in tensors.items() if r not in owed)
        self._stable.update((r, value) for r, value in gives if r not in interface.copied)
        for register in interface.gives:
            registers[register] = None
        return gives, loans

    def _record_all(self, outlasting: Outlasting) -> DeviceGraph:
        """Capture the segment with its messages.

        If something fails, the capture ends like any other. Its graph may have messages, and
        dropping it would make the library wait for the device. So it is kept until all are dropped.
        """
        failures: list[RuntimeError] = []

        def work() -> None:
            try:
                self._record(outlasting)
            except RuntimeError as error:
                failures.append(error)

        try:
            graph = self._device.capture(work, self._order.compute)
        except RuntimeError:
            if failures:  # what went wrong has broken the capture, too
                raise failures.pop() from None
            raise
        if failures:
            self._failed = graph
            raise failures.pop()  # nothing here refers to it: its traceback refers to the graph
        return graph

    def _record(self, outlasting: Outlasting) -> None:
        order = self._order
        for port, memory in outlasting.landings:
            port.landing = memory
        gradients = {id(parameter): memory for parameter, memory in outlasting.gradients}
        for new in self._new_gradients:
            new.update(gradients)
        order.begin_capture()
        try:
            order.fork()
            for instruction in self._instructions:
                instruction()
            order.join()
            self._copy_out(outlasting)
        except BaseException:
            with suppress(RuntimeError):  # as when the capture is broken
                order.join()  # a capture cannot end without the streams that it has forked
            raise
        finally:
            order.end_capture()
            for new in self._new_gradients:
                new.clear()
            for port, _ in outlasting.landings:
                port.landing = None

    def _copy_out(self, outlasting: Outlasting) -> None:
        registers = self._registers
        uncopied = [pair for pair in outlasting.gradients if pair[0].grad is not pair[1]]
        sources = [registers[register] for register, _ in outlasting.copies]
        sources += [parameter.grad for parameter, _ in uncopied]
        copy_all([memory for _, memory in (*outlasting.copies, *uncopied)], sources)
        for register, memory in outlasting.copies:
            registers[register] = memory
        for parameter, memory in uncopied:
            set_gradient(parameter, memory)
