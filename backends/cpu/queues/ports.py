"""The ports of `send` and `recv`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...failures.poison import Poison
from ..memory.codecs import TensorCodec
from ..memory.layout import POISON
from .local import LocalReceiver, LocalSender
from .messages import Incoming, Outgoing, OutgoingTensor, ReceiveLane, SendLane


class SendPort:
    """Sends one message; done when its value may be changed."""

    __slots__ = ("_lane", "_message")

    def __init__(self, lane: SendLane, message: Outgoing) -> None:
        self._lane = lane
        self._message = message

    def own(self) -> None:
        """See `Port`."""
        self._message.keeps = True

    def start(self, value: Any) -> None:
        """See `Port`."""
        message = self._message
        message.load(value)
        self._lane.push(message)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        message = self._message
        message.fail(poison)
        self._lane.push(message)

    def poll(self) -> bool:
        """See `Port`."""
        message = self._message
        if not message.done:
            self._lane.progress()
        return message.done

    def take(self) -> None:
        """See `Port`."""

    def release(self) -> None:
        """See `Port`."""


class SlotSendPort:
    """Sends a tensor through its planned slot of shared memory: at once, if the slot is free."""

    __slots__ = (
        "_at",
        "_consumed",
        "_dtype",
        "_full",
        "_lane",
        "_memory",
        "_message",
        "_nbytes",
        "_order",
        "_shape",
        "_size",
        "_slot",
        "_view",
        "_words",
        "_write_large",
    )

    def __init__(self, lane: LocalSender, codec: TensorCodec, slot: int) -> None:
        assert codec.nbytes is not None
        self._lane = lane
        self._slot = slot
        self._words = lane.words
        self._order = lane.node.order
        self._consumed, self._nbytes, self._full, memory, at = lane.place_of(slot)
        self._view = codec.view(memory, at, 0, False)
        self._memory, self._at = memory, at
        self._write_large = codec.write_large if codec.is_large else None
        self._dtype, self._shape, self._size = codec.dtype, codec.shape, codec.nbytes
        self._message = OutgoingTensor(codec, slot)

    def own(self) -> None:
        """See `Port`."""
        self._message.keeps = True

    def start(self, value: Any) -> None:
        """See `Port`."""
        lane, slot, words, message = self._lane, self._slot, self._words, self._message
        sent = lane.sent[slot]
        is_free = not lane.queue
        for word in self._consumed:
            if words[word] != sent:
                is_free = False
        if (
            not is_free
            or type(value) is not Tensor
            or value.dtype is not self._dtype
            or value.shape != self._shape
            or value.requires_grad
        ):
            message.load(value)
            lane.push(message)
            return
        order = self._order
        if order is not None:
            order()
        write_large = self._write_large
        if write_large is None or not write_large(value, self._memory, self._at):
            self._view.copy_(value)
        words[self._nbytes] = self._size
        if order is not None:
            order()
        words[self._full] = lane.sent[slot] = sent + 1
        message.done = True
        lane.announce()

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self._message.fail(poison)
        self._lane.push(self._message)

    def poll(self) -> bool:
        """See `Port`."""
        message = self._message
        if not message.done:
            self._lane.progress()
        return message.done

    def take(self) -> None:
        """See `Port`."""

    def release(self) -> None:
        """See `Port`."""


class RecvPort:
    """Receives one message: into storage of its own, into the operand, or into a held slot."""

    __slots__ = ("_lane", "_message")

    def __init__(self, lane: ReceiveLane, message: Incoming) -> None:
        self._lane = lane
        self._message = message

    def start(self, value: Any) -> None:
        """See `Port`."""
        self._message.into = value
        self._lane.post(self._message)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self.start(None)

    def poll(self) -> bool:
        """See `Port`."""
        message = self._message
        if not message.done:
            self._lane.progress()
        return message.done

    def take(self) -> Any:
        """See `Port`."""
        message = self._message
        message.into = None
        return message.take()

    def peek_error(self) -> Poison | None:
        """See `Port`."""
        error = self._message.error if self.poll() else None
        return error if isinstance(error, Poison) else None

    def release(self) -> None:
        """See `Port`."""
        message = self._message
        if message.hold and message.error is None:
            self._lane.release(message)


class SlotRecvPort:
    """Receives a tensor in its planned slot of shared memory: no copy, and nothing to look up."""

    __slots__ = (
        "_consumed",
        "_full",
        "_lane",
        "_nbytes",
        "_number",
        "_order",
        "_slot",
        "_view",
        "_words",
    )

    def __init__(self, lane: LocalReceiver, codec: TensorCodec, slot: int) -> None:
        self._lane = lane
        self._slot = slot
        self._words = lane.words
        self._order = lane.node.order
        self._full, self._nbytes, self._consumed = lane.words_of(slot)
        self._number = 0
        memory, at = lane.payload_of(slot)
        self._view = codec.view(memory, at, 0, False)

    def start(self, value: Any) -> None:
        """Post: reserve the next message of the slot; it touches no payload."""
        self._number = self._lane.next_number(self._slot)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self.start(None)

    def poll(self) -> bool:
        """See `Port`."""
        if self._words[self._full] < self._number:
            return False
        if self._order is not None:
            self._order()
        return True

    def take(self) -> Any:
        """See `Port`."""
        if self._words[self._nbytes] >= POISON:
            raise self._lane.read_poison(self._slot)
        return self._view

    def peek_error(self) -> Poison | None:
        """See `Port`."""
        if self._words[self._consumed] >= self._number or not self.poll():
            return None
        return self._lane.read_poison(self._slot) if self._words[self._nbytes] >= POISON else None

    def release(self) -> None:
        """See `Port`."""
        self._lane.consume(self._consumed, self._number)
