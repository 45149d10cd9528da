"""The loop on rank 0 of a model that pools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .. import wire
from ..features import Features
from ..requests import ERROR, End, Events, Request
from ..serving_loop import PATIENCE, Loop
from ..wire import Kind
from .packing import PoolingScheduler, PoolingTicket
from .work import PooledResult, PoolingEngine, Vectors


class PoolingLoop(Loop[PoolingTicket]):
    """Serves one front with one engine of a model that pools.

    Args:
        in_flight: batches at a time.
        patience: as `PATIENCE`.
    """

    def __init__(
        self, engine: PoolingEngine, in_flight: int = 2, patience: float = PATIENCE
    ) -> None:
        super().__init__(engine, Features(), 1, patience)
        self.engine = engine
        self.scheduler = PoolingScheduler(engine, in_flight)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def obey(self, command: Request | int) -> None:
        if isinstance(command, int):
            self.scheduler.cancel(command)
            return
        try:
            self.scheduler.add(command)
        except ValueError as error:  # the front has checked it, so it is the front's mistake
            self.scheduler.ends.append(End(command.id, ERROR, 0, str(error)))

    def tickets(self) -> Iterable[PoolingTicket]:
        return self.scheduler.schedule()

    def start(self, ticket: PoolingTicket) -> tuple[int, PooledResult]:
        return 0, self.engine.submit(ticket.work)

    def read(self, result: PooledResult) -> Vectors:
        return result.vectors()

    def complete(self, ticket: PoolingTicket, values: Vectors) -> None:
        self.scheduler.complete(ticket, values)

    def drop(self, ticket: PoolingTicket, message: str) -> None:
        self.scheduler.fail(ticket, message)

    def send(self) -> None:
        """Send new vectors in frames, then their ends; keep them while the front does not read."""
        scheduler = self.scheduler
        if not scheduler.ends or self.link.is_full:
            return
        frame = bytearray()
        for id_, values in scheduler.vectors:
            frame += wire.pack_vector(id_, values)
            if len(frame) >= wire.CUT:
                self.link.send(Kind.VECTORS, bytes(frame))
                frame.clear()
        if frame:
            self.link.send(Kind.VECTORS, bytes(frame))
        self.link.send(Kind.EVENTS, wire.pack_events(Events(ends=scheduler.ends)))
        scheduler.vectors, scheduler.ends = [], []
        if self.is_idle:
            self.send_stats()

    def counts(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            **asdict(scheduler.stats),
            "running": scheduler.running,
            "waiting": scheduler.waiting,
        }
