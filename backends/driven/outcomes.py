"""The outcome of an execution: the part of its future that every execution goes through.

`Outcome` is compiled, and `Future`, which extends it, is not, so that futures have all that
Python's objects have, such as weak references.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..compiling import mypyc_attr
from ..failures.flight import ASKING, FlightRecord
from ..poison import Poison


class ExecutionProgress(Protocol):
    """Moves executions on; they move in calls of these methods alone."""

    def turn(self) -> bool:
        """Go on with everything as far as it comes; true if anything has moved."""

    def wait(self, future: Any, timeout: object) -> None:
        """Go on until the future is done.

        Raises:
            StepTimeout: the time is up.
            TypeError, ValueError: the timeout is no number of seconds.
        """

    def later(self, future: Any) -> None:
        """Call the future's callbacks as soon as no instruction is running."""

    def watch(self, future: Any) -> Generator[Any, None, None]:
        """Go on inside an asyncio event loop until the future is done."""


class Waiting(Protocol):
    """The way in which a process waits, and learns that others have ended."""

    def pause(self, polls: int, seconds: float | None) -> None:
        """Give way after `polls` fruitless turns in a row, for no longer than `seconds`.

        Raises:
            TransportError: a rank has ended that executions need.
        """

    def rest(self) -> None:
        """The wait is over: nobody needs to wake this process."""

    def where(
        self,
        ranks: Sequence[int],
        records: Sequence[FlightRecord] = (),
        seconds: float = ASKING,
    ) -> str:
        """Describe where ranks of other processes are, and those of `records` (`HangReporter`)."""

    def serving(self) -> AbstractContextManager[object]:
        """A context around the time in which this process serves."""

    def watch(self, turn: Callable[[], bool], future: Any) -> Generator[Any, None, None]:
        """Wait for a future inside an asyncio event loop."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Outcome:
    """The outcome of one execution, as far as it is known.

    Attributes:
        execution: number of the execution in its graph, from 0.
        is_done: whether it has ended, as far as the driver has seen.
    """

    def __init__(self, progress: ExecutionProgress, execution: int) -> None:
        self.execution = execution
        self.is_done = False
        self._progress = progress
        self._value: Any = None
        self._poison: Poison | None = None
        self._delivery: Callable[[], None] | None = None
        self._callbacks: list[Callable[[Any], object]] | None = None

    def _take(self, timeout: object) -> Any:
        """Return the result, or raise the error, as `Future.result` does."""
        if not self.is_done:
            self._progress.wait(self, timeout)
        if self._poison is not None:
            # A new error each time: its traceback refers to the frames that hold the future, so a
            # future that kept it would be part of a reference cycle.
            raise self._poison.error()
        if self._delivery is not None:
            self._delivery()
        return self._value


def resolve(
    outcome: Outcome, value: Any, poison: Poison | None, delivery: Callable[[], None] | None = None
) -> None:
    """Note how an execution has ended; `delivery` is called before the value is used.

    This is no method, because a method that a subclass may replace is looked up at each call.
    """
    outcome._value = value
    if delivery is not None:
        outcome._delivery = delivery
    if poison is not None:
        outcome._poison = poison
    if outcome._callbacks is not None:
        outcome._progress.later(outcome)
    outcome.is_done = True  # last: until then it may be resolved once more
