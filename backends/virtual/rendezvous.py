"""Collectives of the virtual world: a group meets, and each rank gets its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ...ir.module import Channel
from ...ir.ops import Collective, Exchange
from ...ir.printer import format_op
from ...ir.types import ValueType
from ..errors import TransportError
from ..failures.poison import Poison
from ..program.value_copies import duplicate
from .collectives import outcomes
from .traffic import End, Traffic


class CollectivePort:
    """One rank's part of a collective."""

    def __init__(
        self,
        op: Collective,
        rank: int,
        result: ValueType,
        meetings: Meetings,
        line: deque[End] | None,
    ) -> None:
        self.op = op
        self.place = meetings
        self.line = line
        self.rank = rank
        self.type = result
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def start(self, value: Any) -> None:
        """Come to the meeting with this rank's operand."""
        self.value = value
        self.done = False
        self.place.join(self)

    def fail(self, poison: Poison) -> None:
        """Come to the meeting with an error, which every rank then gets."""
        self.start(poison)

    def poll(self) -> bool:
        """Whether all have come."""
        return self.done

    def finish(self, result: Any) -> None:
        """Take over the result."""
        self.value = result
        self.error = None
        self.done = True

    def break_off(self, error: Exception) -> None:
        """Take over what has gone wrong instead."""
        self.value = None
        self.error = error
        self.done = True

    def take(self) -> Any:
        """This rank's result, in storage of its own."""
        if self.error is not None:
            raise self.error
        return self.value

    def release(self) -> None:
        """Drop the port's own reference to the result."""
        self.value = None


class Meetings:
    """One collective channel: for each rank the collectives that it has come to, in order."""

    def __init__(self, channel: Channel, traffic: Traffic) -> None:
        self._channel = channel
        self._traffic = traffic
        self._queues: dict[int, deque[CollectivePort]] = {r: deque() for r in channel.ranks}

    def join(self, port: CollectivePort) -> None:
        self._queues[port.rank].append(port)
        self._traffic.start(port)

    def match(self) -> None:
        """Hold the meetings that all have come to."""
        while all(self._queues.values()):
            ports = [queue[0] for queue in self._queues.values()]
            if not self._traffic.may_complete(ports):
                return
            for queue in self._queues.values():
                queue.popleft()
            self._meet(ports)
            self._traffic.completed(ports)

    def reset(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def _meet(self, ports: Sequence[CollectivePort]) -> None:
        first = ports[0].op
        for port in ports[1:]:
            if (type(port.op), port.op.seq) != (type(first), first.seq):
                raise TransportError(
                    f"collectives of channel {self._channel.id} do not match: rank "
                    f"{ports[0].rank} has come to `{format_op(first)}`, rank {port.rank} to "
                    f"`{format_op(port.op)}`"
                )
        exchange = first.exchange
        values = {port.rank: port.value for port in ports}
        operands = [values[rank] for rank in exchange.senders]
        poison = next((value for value in operands if isinstance(value, Poison)), None)
        if poison is not None:
            self._pass_on(poison, ports, exchange)
            return
        try:
            results = _results(exchange, operands, ports)
        except Exception as error:  # raised by `take` on every rank, as it would be elsewhere
            for port in ports:
                port.break_off(error)
            return
        for port, result in zip(ports, results, strict=True):
            port.finish(result)

    def _pass_on(self, poison: Poison, ports: Sequence[CollectivePort], exchange: Exchange) -> None:
        """Receivers get the error of a sender, other members their own alone."""
        for port in ports:
            if port.rank in exchange.receivers:
                port.break_off(poison)
            elif isinstance(port.value, Poison):
                port.break_off(port.value)
            else:
                port.finish(None)


def _results(
    exchange: Exchange, operands: Sequence[Any], ports: Sequence[CollectivePort]
) -> list[Any]:
    if exchange.receivers and exchange.is_whole:  # of a tensor, an object or a unit
        (value,) = operands
        return [duplicate(value, port.type) for port in ports]
    return outcomes(exchange, operands)
