"""Runs this process's rank of a step, with the other ranks in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...backends.agreement.plan_hash import check_plan
from ...backends.base import World
from ...backends.cpu.transport import CpuTransport
from ...backends.failures.flight import FlightRecord
from ...backends.program.executor import Executable
from ...backends.program.linked import LinkedModule, LinkedProgram
from ...backends.timing.statistics import Statistics
from ...backends.timing.tracing import Recordable
from ...ir.module import Module
from ..api.numbering import Numbering
from ..world.communicators import connect_channels
from ..world.comparison import CallFacts
from ..world.failure import say_departure

Inputs = Callable[[], Sequence[Any]]
"""Gives the values of the step's parameters, checked; raises if the arguments do not fit."""


class RankRuntime:
    """See `Runtime`. Making one is collective.

    The transport of hosts begins and ends executions on all ranks together, whatever carries their
    messages.

    Args:
        world: all ranks, one for each process.
        transport: of hosts.
        linked: the scheduled step, and what it runs with.
        parameters: names of the step's parameters, in the order of its inputs.
        timeout: seconds that an execution may take; None for no limit.
        numbering: numbers the executions.
        call: the step, its arguments, and whether ranks compare them; None if it is no step.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
        UnknownCommunicator: the step names a transport that nobody has registered.
        BindError: a transport cannot carry what it is to carry.
    """

    def __init__(
        self,
        world: World,
        transport: CpuTransport,
        linked: LinkedModule,
        parameters: Sequence[str],
        timeout: float | None,
        numbering: Numbering,
        call: CallFacts | None,
    ) -> None:
        module = linked.module
        self._numbering = numbering
        self._execution = -1
        self._plan = int(check_plan(module, world)[:16], 16)
        self._timeout = timeout
        self._transport = transport
        self._control = transport.control
        channels = list(module.channels.values())
        connected = connect_channels(world, transport, channels, module.name)
        self._communicators = connected.communicators
        self._streams = connected.streams
        try:
            self._executable = self._bind(linked.program(world.rank, connected.serving))
        except BaseException:
            RankRuntime.close(self)  # nobody else will
            raise
        self._progress = tuple(each.progress for each in self._communicators)
        self._pick = pick(module, world.rank, parameters)
        self._takes_all = self._pick == list(range(len(parameters)))
        self._describe = lambda found, sights: FlightRecord(module, found).describe(sights)
        self._recover = transport.recover_if_due
        self._doing = f"a call of {module.name if call is None else call.words}"
        comparison = None if call is None else call.comparison
        self._compare = comparison and comparison(world, self._control, self._progress)
        self._until_compared = 0 if self._compare is None else 1

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        """See `Runtime`. Collective; all ranks return, or all raise the same error."""
        control, executable = self._control, self._executable
        self._recover()
        numbering = self._numbering
        execution = self._execution = numbering.next
        numbering.next = execution + 1
        self._until_compared -= 1
        compare = None if self._until_compared else self._compare
        if compare is not None:
            self._until_compared = compare.plan_next()  # whatever comes of this execution
        control.begin(self._plan, executable.position, self._describe, self._timeout, self._doing)
        try:
            values = inputs()
            if compare is not None:
                compare.compare(values)
            if not self._takes_all:
                values = [values[index] for index in self._pick]
            outputs = executable.run(values, control.pause, execution, checked=True)
            control.commit(self._progress)
        except BaseException as error:
            say_departure(error)  # before other ranks know of it, and may end the job
            agreed = self._fail(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C stays Ctrl-C, whatever else has failed
            raise agreed from error.__cause__
        return outputs

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        """See `Runtime`."""
        return {self._executable.rank: [self._executable]}

    def statistics(self, rank: int) -> Statistics:
        """See `Runtime`."""
        if rank != self._executable.rank:
            raise ValueError(
                f"this is rank {self._executable.rank}, and it has no statistics of rank {rank}; "
                "cg.allgather() exchanges them"
            )
        return self._executable.statistics

    def close(self) -> None:
        """See `Runtime`."""
        for communicator in self._communicators:
            communicator.close()

    def _bind(self, linked: LinkedProgram) -> Executable:
        return Executable(linked)

    def _fail(self, error: BaseException) -> BaseException:
        """Tell all ranks of a failure; the error that all of them raise."""
        return self._transport.fail(error, self._resets())

    def _resets(self) -> Sequence[Callable[[], None]]:
        """What makes this rank ready for another execution, once all ranks are there."""
        return (self._executable.reset, *(each.reset for each in self._communicators))


def pick(module: Module, rank: int, parameters: Sequence[str]) -> list[int]:
    """For each parameter of a rank's program its index among the step's."""
    index = {name: i for i, name in enumerate(parameters)}
    return [index[value.name] for value in module.program_of(rank).params]
