"""The future of one execution: what `execute` returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from ..errors import RemoteError
from .outcomes import ExecutionProgress, Outcome

_LOG = logging.getLogger("cg")

Callback = Callable[["Future"], object]


class _UntilDone:
    """An awaitable that ends when a future is done; it does not raise the future's error."""

    def __init__(self, future: Future, progress: ExecutionProgress) -> None:
        self._future = future
        self._progress = progress

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._progress.watch(self._future)


class Future(Outcome):
    """The result of an execution, sooner or later.

    The graph's executions go on while the driver is in a method of a future or of the graph.
    The return value of `result` belongs to the caller; tensors on a device are there for whatever
    the caller puts on its current stream. Futures of one graph may be asked in any order, or
    not at all. They are no more thread-safe than the graph: use one thread, or a lock.

    Attributes:
        execution: number of the execution in its graph, from 0.
        is_done: whether it is done, as far as the driver has seen; unlike `done`, this moves
            nothing on.
    """

    _attendant: asyncio.Task[None] | None = None

    def done(self) -> bool:
        """Move the execution on, without waiting; true if it has ended."""
        if not self.is_done:
            self._progress.turn()
        return self.is_done

    def result(self, timeout: float | None = None) -> Any:
        """The value that the step returns.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            RemoteError: a method has raised. The error is also of the original's class where that
                is possible, so `except ValueError` catches a method's ValueError.
            StepTimeout: the time is up, which is a `TimeoutError`. The execution goes on, and can
                be asked for again.
            TransportError: a rank has ended.
            TypeError, ValueError: the timeout is no number.
        """
        return self._take(timeout)

    def exception(self, timeout: float | None = None) -> RemoteError | None:
        """The execution's own error, which `result` would raise, or None.

        Raises:
            StepTimeout, TransportError, TypeError, ValueError: as `result`.
        """
        if not self.is_done:
            self._progress.wait(self, timeout)
        return None if self._poison is None else self._poison.error()

    def add_done_callback(self, callback: Callback) -> None:
        """Call `callback(future)` when the execution has ended; at once if it has.

        It is called while the driver moves executions on, in the driver's thread; a running event
        loop of asyncio goes on with them meanwhile. If a rank has died, such a loop logs it and
        calls back, too: the future is not done then, and `result` raises. An exception of the
        callback is logged.
        """
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self.is_done:
            self.call_back()
        elif self._attendant is None:
            with contextlib.suppress(RuntimeError):  # no loop is running
                self._attendant = asyncio.get_running_loop().create_task(self._attend())

    def remove_done_callback(self, callback: Callback) -> int:
        """Call `callback` no more; how often it would have been called."""
        before = self._callbacks or []
        self._callbacks = [registered for registered in before if registered != callback]
        return len(before) - len(self._callbacks)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_done:
            yield from self._progress.watch(self)
        return self.result()

    def __repr__(self) -> str:
        state = "pending"
        if self.is_done:
            state = "failed" if self._poison is not None else "done"
        return f"<Future of execution {self.execution}, {state}>"

    def cancelled(self) -> bool:
        """False: an execution that has been started comes to its end."""
        return False

    def __copy__(self) -> NoReturn:
        raise self._stays("copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self._stays("copied")

    def __reduce__(self) -> NoReturn:
        raise self._stays("pickled or sent")

    def _stays(self, action: str) -> TypeError:
        return TypeError(
            f"{self!r} cannot be {action}: executions go on only where they were started. Take the "
            "value first, by result(), and use that"
        )

    async def _attend(self) -> None:
        """Move the execution on inside an event loop, for callers that wait for a callback."""
        try:
            if not self.is_done:
                await _UntilDone(self, self._progress)
        except Exception:
            _LOG.exception("%r cannot end", self)
            self.call_back()  # wake waiters so that they see the error
        finally:
            self._attendant = None

    def call_back(self) -> None:
        """Call what was to be called; for those who run the execution."""
        callbacks = self._callbacks
        while callbacks:  # one after the other: after an interruption the rest is still there
            callback = callbacks.pop(0)
            try:
                callback(self)
            except Exception:
                _LOG.exception("exception calling callback %r for %r", callback, self)
