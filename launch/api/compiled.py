"""A compiled step: called on all ranks together, or driven from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ...backends.base import World
from ...backends.driven.futures import Future
from ...backends.timing.statistics import Statistics
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ...tracer.errors import TraceError
from ...tracer.record.session.session import current
from ...tracer.source import caller_location
from ..cache.compile_cache import cache_of
from ..measure.profiling import ProfiledPrograms, watch
from ..measure.recording import RecordedTimes, record
from ..runtime import driven_graphs as graphs
from ..runtime import execution_contexts
from ..runtime.agreement import call_text
from ..runtime.numbering import Numbering, check_state
from ..runtime.runtime import Runtime, make_runtime
from ..runtime.step_lock import lock_of
from ..world.comparison import CallFacts
from .compile_options import CompileOptions
from .compiled_programs import Programs, Variant
from .parameter_names import check_executions
from .repeated import Repeated
from .selection import selection


class Compiled(Programs):
    """Every rank's schedule of a step, bound to the ranks that this process plays.

    A step is called on all ranks together. One with `inputs=cg.on(rank)` is a graph as well: that
    rank, its driver, starts executions by `execute` while the other ranks are in `serve`. Both may
    be used in one program, but not at the same time.

    As a context manager, it is closed at the end of the block: the driver closes it, and the other
    ranks serve until then.

    Attributes:
        variants: one for each signature that it was compiled for.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        world: World,
        options: CompileOptions,
        driver: int | None,
        numbering: Numbering,
    ) -> None:
        super().__init__(variants, world, driver)
        self._lock = lock_of(world)
        self._options = options
        self._numbering = numbering
        self._select = selection([variant.trace.inputs for variant in variants])
        self._chooses = len(variants) > 1
        self._runtimes: list[Runtime | None] = [None] * len(variants)
        place = variants[0].trace.outputs.place  # of the step, and so of all variants
        self._returns = any(world.plays(rank) for rank in place.ranks)
        self._closed = False
        self._check_idle = graphs.idle_check(world, self._name)
        self._watched: list[ProfiledPrograms] = []
        self._open_graph: graphs.OpenGraph | None = None
        self._launch: graphs.Launch | None = None
        self._behind: Callable[[], None] | None = cache_of(world).write_behind
        if driver is None:
            for index in range(len(variants)):
                self._runtime(index)
        else:
            self._open_graph = self._make_graph(driver)
            self._launch = self._open_graph.launch
            self._picks = [variant.pick(driver) for variant in variants]
            guarded = any(variant.trace.guards for variant in variants)
            self._needs_more = guarded or any(pick is not None for pick in self._picks)
            if self._launch is None:
                self._behind = None
                open_graph = self._open_graph
                cache_of(world).write_behind(lambda: open_graph.started > 0)

    def state_dict(self) -> dict[str, int]:
        """The state that random numbers depend on, to be saved with the state of the actors.

        Returns:
            The `seed`; `calls`, how often the step has been called, with any of its signatures,
            without calls that a rank has refused, as by `InputError`; and of a step with
            `inputs=cg.on(rank)` also `executions`, how many that rank has started: save those of
            that rank, for others know of them when they have served. All are ints.
        """
        state = {"seed": self._options.chosen_seed, "calls": self._numbering.next}
        if self._open_graph is not None:
            state["executions"] = self._open_graph.started
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next execution draws the random numbers that follow it.

        Collective; of a step with `inputs=cg.on(rank)`, before the other ranks `serve`.

        Args:
            state: what `state_dict` has returned, of a step that was compiled with the same seed.

        Raises:
            PlanMismatch: ranks go on from different states.
            RuntimeError: executions are in flight.
            TypeError: the state holds something else than numbers.
            ValueError: it is of a run with another seed, or of another kind of step.
        """
        counts = ("calls",) if self._open_graph is None else ("calls", "executions")
        check_state(self._world, self._name, state, self._options.chosen_seed, counts)
        self._check_idle()
        self._numbering.next = state["calls"]
        if self._open_graph is not None:
            self._open_graph.go_on_from(state["executions"])

    # -- on all ranks together --------------------------------------------------------------

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all ranks; collective.

        Returns:
            The result of the function; None on ranks that get no outputs.

        Raises:
            InputError: the arguments are not of the types that were traced, or ranks are found to
                give different ones (see `check_inputs` of `compile`); nothing was sent.
            PlanMismatch: ranks call different steps, or this one with other signatures.
            RemoteError: a method or an op raised, on any rank; every rank raises it, and the step
                can be called again.
            RuntimeError: executions are in flight on this rank, a method is running, the step has
                been closed, or, where there are other processes, another thread uses a step.
            StepTimeout: a rank has waited too long; the message says where every rank is.
            TransportError: a rank has ended.
        """
        lock = self._lock
        if not lock.acquire(False):
            lock.wait(self._name)
        try:
            self._check_callable()
            index = self._select(args, kwargs)[0] if self._chooses else 0
            variant, runtime = self.variants[index], self._runtimes[index]
            if runtime is None:
                runtime = self._runtime(index)
            outputs = runtime.run(lambda: variant.inputs(args, kwargs))
            return variant.trace.outputs.rebuild(outputs) if self._returns else None
        finally:
            lock.release()
            if self._behind is not None:
                self._write_behind(self._behind)

    # -- from the driver --------------------------------------------------------------------

    def execute(self, /, *args: Any, block: bool = True, **kwargs: Any) -> Future:
        """Start an execution; on the driver, while the other ranks are in `serve`.

        Executions go through each actor in the order in which they were started, whatever graph
        they are of. The arguments are read until the future is done: do not change them before.

        Args:
            args, kwargs: as the step takes them.
            block: True to wait while `max_inflight` executions are in flight, for no longer than
                the `timeout` that `compile` was given.

        Returns:
            The future of what the step returns on the driver; None is its result if `outputs`
            are on other ranks. It is done when everything that the execution calls has run.

        Raises:
            InputError: the arguments are not of the types that were traced; nothing was sent.
            CapacityError: `max_inflight` executions are in flight, or ranks start over after an
                interruption, and `block` is false.
            StepTimeout: it has waited too long for one to end; nothing was sent. Try again later.
            RuntimeError: this rank is not the driver, or the graph has been closed. An actor of
                this rank has changed since it was traced, or a method of this rank asks for it.
                Another thread is using this rank's graphs, or tracing a step.
            TransportError: a rank has ended, or Ctrl-C came earlier and ranks cannot start over.
        """
        launch = self._launch
        if launch is None:
            raise self._cannot_execute()
        variant, values = self._select(args, kwargs)
        if self._lock.is_tracing:
            raise RuntimeError(
                f"an execution of '{self._name}' is asked for while a step is being traced, which "
                "puts stand-ins in place of what actors hold: start it before or after"
            )
        if self._needs_more:
            values = self._check_and_pick(variant, values)
        try:
            return launch(variant, values, block)
        finally:
            if self._behind is not None:
                self._write_behind(self._behind)

    def serve(self) -> None:
        """Run executions until the driver closes the graph; on every rank but the driver.

        Executions of other graphs of the driver are run as well. Returns at once if the graph has
        been closed, and in a virtual world, where one process plays all ranks.

        Raises:
            RuntimeError: this rank is the driver, or the step has none.
            TransportError: a rank has ended without closing the graph.
        """
        open_graph = self._open_graph
        if open_graph is None:
            raise _no_driver(self._name, "serve()")
        if self._world.is_virtual:
            return
        if open_graph.graph.driver == self._world.rank:
            raise RuntimeError(
                f"rank {self._world.rank} drives '{self._name}': it calls execute() and close(), "
                "and the other ranks serve()"
            )
        if open_graph.recover is not None:
            open_graph.recover()
        open_graph.serve()
        self._close_runtimes()

    def close(self) -> None:
        """End the step, and give back its buffers; idempotent. It cannot be run after that.

        Methods that describe it, such as `statistics` and `visualize`, still work.

        The driver of a graph waits for the executions in flight, and then lets all ranks leave
        `serve`. On another rank this is `serve`, if the driver has not closed the graph yet.

        Raises:
            StepTimeout: none of them has moved on the driver for as long as the `timeout` of
                `compile`; the message says where every rank is. It can be closed again, and a
                driver that ends without that ends the job.
            TransportError: a rank has ended while the driver waited for it.
        """
        if self._closed:
            return
        open_graph = self._open_graph
        if open_graph is not None and open_graph.graph.driver in open_graph.executions.schedulers:
            open_graph.executions.close(open_graph.graph)
        elif open_graph is not None:
            self.serve()
        self._close_runtimes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        open_graph = self._open_graph
        drives = open_graph is None or open_graph.graph.driver in open_graph.executions.schedulers
        if drives or kind is None:
            self.close()

    # -- looking at it ----------------------------------------------------------------------

    def statistics(self, rank: int | None = None) -> Statistics:
        """The times that a rank of this process has measured of its executions so far.

        Later executions do not change the result.

        Raises:
            ValueError: another process plays that rank.
        """
        chosen = self._world.rank if rank is None else rank
        runtimes = [runtime for runtime in self._runtimes if runtime is not None]
        statistics = Statistics()
        if self._open_graph is not None:
            if chosen not in self._open_graph.statistics:
                raise ValueError(
                    f"this is rank {self._world.rank}, and it has no statistics of rank {chosen}; "
                    "cg.allgather() exchanges them"
                )
            statistics += self._open_graph.statistics[chosen]
        for runtime in runtimes:
            statistics = runtime.statistics(chosen) + statistics
        return statistics

    def record(
        self, /, *args: Any, executions: int | None = None, **kwargs: Any
    ) -> list[RecordedTimes]:
        """Run the step on all ranks, and say when each call ran; collective.

        Each run does all that a call does, such as an update of weights. A recording has the same
        form as the result of `simulate`, so the two can be compared. Calls are timed as
        `cg.measure` times them; work that would be replayed as a graph runs call by call.

        Args:
            args, kwargs: as the step takes them.
            executions: how often; once if None. If the step itself has a parameter of that name,
                use `repeated`.

        Returns:
            One recording for each execution, the same on all ranks.

        Raises:
            As calling the step does.
            TypeError: `executions` may be meant for the step.
            ValueError: it is less than 1.
        """
        return self._repeated("record", executions, 1).record(*args, **kwargs)

    def measure(self, /, *args: Any, executions: int | None = None, **kwargs: Any) -> Costs:
        """Measure the step's costs, as `cg.measure` does."""
        return self._repeated("measure", executions, 5).measure(*args, **kwargs)

    def repeated(self, executions: int) -> Repeated:
        """The step, to be recorded or measured several times: `compiled.repeated(3).record(x)`.

        Raises:
            TypeError: `executions` is no integer.
            ValueError: it is less than 1.
        """
        return Repeated(executions, self._record, self._world)

    def _write_behind(self, write: Callable[[], None]) -> None:
        """Let the compile cache write what this start has made."""
        self._behind = None
        write()

    # -- making it --------------------------------------------------------------------------

    def _check_callable(self) -> None:
        """Return if all ranks may run the step now; raise otherwise."""
        if self._closed:
            raise self._closed_error()
        if current() is not None:
            raise TraceError(
                f"step '{self._name}' is compiled, and called inside a step that is being traced",
                loc=caller_location(),
                remedy="call the plain Python function from the step",
            )
        self._check_idle()

    def _repeated(self, method: str, executions: int | None, otherwise: int) -> Repeated:
        """The repeated step, for a method that takes `executions` beside the step's arguments."""
        if executions is None:
            return self.repeated(otherwise)
        for variant in self.variants:
            check_executions(variant.trace.inputs, method)
        return self.repeated(executions)

    def _record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], executions: int
    ) -> tuple[Module, list[RecordedTimes]]:
        with self._lock.held(self._name):
            self._check_callable()
            chosen = self.variants[self._select(args, kwargs)[0] if self._chooses else 0]
            return chosen.module, record(
                self._world,
                chosen.linked(self._options.chosen_seed),
                chosen.parameters,
                lambda: chosen.inputs(args, kwargs),
                executions,
                self._facts(chosen),
                timeout=self._options.call_timeout,
            )

    def _runtime(self, index: int) -> Runtime:
        """The runtime of a variant on all ranks; a driven graph's is made on the first call."""
        runtime = self._runtimes[index]
        if runtime is None:
            variant = self.variants[index]
            with torch.inference_mode(False):  # its buffers are written to in any mode
                runtime = self._runtimes[index] = make_runtime(
                    self._world,
                    variant.linked(self._options.chosen_seed),
                    variant.parameters,
                    timeout=self._options.call_timeout,
                    numbering=self._numbering,
                    call=self._facts(variant),
                )
            self._watched.append(watch(self._world, variant.module, runtime.bound))
        return runtime

    def _facts(self, variant: Variant) -> CallFacts:
        """The facts on calls of a variant that messages and the comparison of arguments need."""
        spec = variant.trace.inputs
        words = call_text(spec, variant.loc)
        return CallFacts(spec, variant.loc, words, self._options.compared_every)

    def _make_graph(self, driver: int) -> graphs.OpenGraph:
        options = self._options
        variants = [
            execution_contexts.GraphVariant(
                variant.linked(options.chosen_seed),
                variant.trace.guards_of,
                variant.trace.outputs.rebuild if driver in variant.trace.outputs.place else None,
            )
            for variant in self.variants
        ]
        with torch.inference_mode(False):
            open_graph = graphs.make_graph(
                self._world, self._name, driver, variants, options.in_flight, options.call_timeout
            )
        for index, variant in enumerate(self.variants):
            bound = {
                rank: [context.instances[index] for context in contexts]
                for rank, contexts in open_graph.graph.contexts.items()
            }
            self._watched.append(watch(self._world, variant.module, bound))
        open_graph.graph.patience = options.execute_timeout
        open_graph.graph.limit = options.call_timeout
        return open_graph

    def _check_and_pick(self, variant: int, values: Sequence[Any]) -> Sequence[Any]:
        self.variants[variant].trace.check_guards(self._driver)
        pick = self._picks[variant]
        return values if pick is None else [values[index] for index in pick]

    def _close_runtimes(self) -> None:
        self._closed = True
        self._launch = None
        for runtime in self._runtimes:
            if runtime is not None:
                runtime.close()

    def _cannot_execute(self) -> RuntimeError:
        open_graph = self._open_graph
        if open_graph is None:
            return _no_driver(self._name, "execute()")
        if open_graph.graph.driver not in open_graph.executions.schedulers:
            return RuntimeError(
                f"rank {open_graph.graph.driver} drives '{self._name}', and this is rank "
                f"{self._world.rank}: call serve() here"
            )
        return self._closed_error()

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"'{self._name}' has been closed: compile it again")


def _no_driver(step: str, call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} needs a rank that drives '{step}': trace it with "
        "@cg.trace(inputs=cg.on(rank)), then lower() and compile() it"
    )
