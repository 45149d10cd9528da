"""The ports of `send` and `recv`. `Port` in `backends/base.py` says what each method does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...poison import Poison
from ..memory.codecs import TensorCodec
from ..memory.layout import POISON
from .local_receiver import LocalReceiver
from .local_sender import LocalSender
from .messages import Incoming, Outgoing, RecvQueue, SendQueue


class SendPort:
    """Sends one message; done when its value may be changed."""

    __slots__ = ("_message", "_queue")

    def __init__(self, queue: SendQueue, message: Outgoing) -> None:
        self._queue = queue
        self._message = message

    def copy_on_start(self) -> None:
        self._message.keeps = True

    def start(self, value: Any) -> None:
        message = self._message
        message.load(value)
        self._queue.send(message)

    def fail(self, poison: Poison) -> None:
        message = self._message
        message.fail(poison)
        self._queue.send(message)

    def poll(self) -> bool:
        message = self._message
        if not message.done:
            self._queue.progress()
        return message.done

    def take(self) -> None:
        """Return: a `send` makes no value."""

    def release(self) -> None:
        """Return: nothing is held."""


class SlotSendPort(SendPort):
    """Sends a tensor through its planned slot of shared memory: at once, if the slot is free."""

    __slots__ = (
        "_at",
        "_consumed",
        "_dtype",
        "_full",
        "_local",
        "_memory",
        "_nbytes",
        "_order",
        "_shape",
        "_size",
        "_slot",
        "_view",
        "_words",
        "_write_large",
    )

    def __init__(self, queue: LocalSender, codec: TensorCodec, slot: int) -> None:
        super().__init__(queue, Outgoing(codec, slot))
        assert codec.nbytes is not None
        self._local = queue
        self._slot = slot
        self._words = queue.words
        self._order = queue.node.order
        self._consumed, self._nbytes, self._full, memory, at = queue.place_of(slot)
        self._view = codec.view(memory, at, 0, False)
        self._memory, self._at = memory, at
        self._write_large = codec.write_large if codec.is_large else None
        self._dtype, self._shape, self._size = codec.dtype, codec.shape, codec.nbytes

    def start(self, value: Any) -> None:
        queue, slot, words, message = self._local, self._slot, self._words, self._message
        sent = queue.sent[slot]
        is_free = not queue.unsent
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
            queue.send(message)
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
        words[self._full] = queue.sent[slot] = sent + 1
        message.done = True
        queue.wake_readers()


class RecvPort:
    """Receives one message: into storage of its own, into the operand, or into a held slot."""

    __slots__ = ("_message", "_queue")

    def __init__(self, queue: RecvQueue, message: Incoming) -> None:
        self._queue = queue
        self._message = message

    def start(self, value: Any) -> None:
        self._message.into = value
        self._queue.post(self._message)

    def fail(self, poison: Poison) -> None:
        self.start(None)

    def poll(self) -> bool:
        message = self._message
        if not message.done:
            self._queue.progress()
        return message.done

    def take(self) -> Any:
        message = self._message
        message.into = None
        return message.take()

    def peek_error(self) -> Poison | None:
        error = self._message.error if self.poll() else None
        return error if isinstance(error, Poison) else None

    def release(self) -> None:
        message = self._message
        if message.hold and message.error is None:
            self._queue.release(message)


class InPlaceRecvPort:
    """Receives one message, which stays in its slot of shared memory until it is taken."""

    __slots__ = ("_consumed", "_full", "_nbytes", "_number", "_order", "_queue", "_slot", "_words")

    def __init__(self, queue: LocalReceiver) -> None:
        self._queue = queue
        self._words = queue.words
        self._order = queue.node.order
        self._slot = self._number = 0
        self._full = self._nbytes = self._consumed = 0

    def poll(self) -> bool:
        if self._words[self._full] < self._number:
            return False
        if self._order is not None:
            self._order()
        return True

    def peek_error(self) -> Poison | None:
        words = self._words
        if words[self._consumed] >= self._number or not self.poll():
            return None
        return self._queue.read_poison(self._slot) if words[self._nbytes] >= POISON else None


class SlotRecvPort(InPlaceRecvPort):
    """Receives a tensor in its planned slot: no copy, and nothing to look up."""

    __slots__ = ("_view",)

    def __init__(self, queue: LocalReceiver, codec: TensorCodec, slot: int) -> None:
        super().__init__(queue)
        self._slot = slot
        self._full, self._nbytes, self._consumed, at = queue.place_of(slot)
        self._view = codec.view(queue.memory, at, 0, False)

    def start(self, value: Any) -> None:
        """Post the receive: reserve the next message of the slot. No payload is touched."""
        self._number = self._queue.next_number(self._slot)

    def fail(self, poison: Poison) -> None:
        self.start(None)

    def take(self) -> Any:
        if self._words[self._nbytes] >= POISON:
            raise self._queue.read_poison(self._slot)
        return self._view

    def release(self) -> None:
        self._queue.consume(self._consumed, self._number)
