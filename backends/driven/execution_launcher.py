"""Start executions of a driven graph on its driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .commands import CONTEXTS, Command, CommandKind
from .executions import Executions
from .futures import Future
from .graphs import DrivenGraph


class ExecutionLauncher:
    """Starts executions of one graph on its driver.

    Args:
        executions: those of the world.
        graph: the graph.
        mark: gets the number of executions that have been started: one integer.
    """

    def __init__(self, executions: Executions, graph: DrivenGraph, mark: memoryview) -> None:
        self._mark = mark
        self._executions = executions
        self._graph = graph
        self._publish = executions.publisher(graph)
        self._scheduler = executions.schedulers[graph.driver]
        self._instances = [context.instances for context in graph.contexts[graph.driver]]
        self._command = Command(CommandKind.EXECUTE, graph.number).pack()
        self._spare: list[Future] = []

    def __call__(self, variant: int, inputs: Sequence[Any], block: bool) -> Future:
        """Start an execution.

        Args:
            variant: the index of the variant.
            inputs: values for the parameters of the driver's program, checked.
            block: whether to wait if the graph is at its capacity.

        Raises:
            CapacityError: the graph is at its capacity, and `block` is false.
            StepTimeout: the graph is at its capacity until its deadline.
            RuntimeError: another thread uses this rank's graphs, or a method that an execution
                calls is running on it.
            TransportError: a rank has ended.
        """
        graph, executions = self._graph, self._executions
        self._scheduler.check_idle()
        if executions.in_doubt or not graph.free:
            executions.make_room(graph, block)
        try:
            number = graph.count
            self._mark[0] = graph.count = number + 1
            context = graph.free.pop()
            # The others are told first, so that they begin while the rest is done here.
            self._publish(self._command + variant * CONTEXTS + context)
            future = self._spare.pop() if self._spare else Future(executions, number)
            future.execution = number
            graph.futures[context] = future
            self._scheduler.begin(self._instances[context][variant], inputs, number)
        except BaseException as error:
            executions.in_doubt = True
            executions.judge(error)
            raise
        if executions.has_due:
            executions.call_back()
        self._spare.append(Future(executions, -1))  # for the next execution, while the others work
        return future
