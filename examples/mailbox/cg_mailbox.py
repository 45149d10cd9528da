"""A communicator for cg that moves values through files, as an example of one that is not cg's own.

After `pip install examples/mailbox` a step may say `cg.via(value, "mailbox")`; cg finds the package
by its entry point of group `cg.communicators`. Files are slow, but they show what travels. Ranks on
several machines need a folder that all of them see.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cg.backends import exchanges
from cg.backends.base import Port, World
from cg.backends.poison import Poison
from cg.ir.ops import Collective, Recv, Send
from cg.ir.ops.module import Channel
from cg.ir.types import ValueType


def connect(world: World, channels: Sequence[Channel]) -> Mailbox:
    """The entry that cg calls, on all ranks together, for channels that go by "mailbox"."""
    folder = tempfile.mkdtemp(prefix="cg-mailbox-") if world.rank == 0 else None
    return Mailbox(world.rank, Path(world.broadcast(folder, root=0)))


class Mailbox:
    """The communicator: makes a port for each op, and numbers the messages of each pair of ranks.

    The n-th message from one rank to another on a channel is file `channel-source-target-n`.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self._sent: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """The port of a `send`."""
        return MailPort(self, channel, to=channel.ranks[1:], reads=())

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """The port of a `recv`."""
        return MailPort(self, channel, to=(), reads=channel.ranks[:1])

    def collective_port(
        self, op: Collective, channel: Channel, operand: ValueType | None, result: ValueType
    ) -> Port:
        """The port of a collective: senders send all that they have, receivers compute."""
        exchange = op.exchange
        senders = exchange.senders or exchange.members
        receivers = exchange.receivers or exchange.members
        to = receivers if self.rank in senders else ()
        reads = senders if self.rank in receivers else ()
        return MailPort(self, channel, to, reads, combine=op)

    def post(self, channel: Channel, target: int, content: bytes) -> None:
        """Write a message to a file, which gets its name when it is complete."""
        line = f"{channel.id}-{self.rank}-{target}"
        file = self.folder / f"{line}-{self._sent[line]}"
        self._sent[line] += 1
        file.with_suffix(".new").write_bytes(content)
        file.with_suffix(".new").rename(file)

    def next_file(self, channel: Channel, source: int) -> Path:
        """The path of the next message from a rank."""
        line = f"{channel.id}-{source}-{self.rank}"
        self._taken[line] += 1
        return self.folder / f"{line}-{self._taken[line] - 1}"

    def progress(self) -> None:
        """Do nothing, since files move on by themselves."""

    def reset(self) -> None:
        """Delete the messages under way after a failure; cg calls it on all ranks together."""
        for file in self.folder.glob(f"*-*-{self.rank}-*"):
            file.unlink()
        self._sent.clear()
        self._taken.clear()

    def close(self) -> None:
        """Delete the folder; the first rank that closes does it."""
        shutil.rmtree(self.folder, ignore_errors=True)


class MailPort:
    """The port of one op: it sends an operand `to` ranks, and makes a value of what it `reads`."""

    needs_release = False

    def __init__(
        self,
        mailbox: Mailbox,
        channel: Channel,
        to: Sequence[int],
        reads: Sequence[int],
        combine: Collective | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._channel = channel
        self._to = to
        self._reads = reads
        self._combine = combine
        self._expected: list[Path] = []
        self._into: torch.Tensor | None = None

    def start(self, value: Any) -> None:
        """Send, and note which files to wait for. A `recv` may be given a tensor to fill."""
        self._into = value if not self._to and isinstance(value, torch.Tensor) else None
        self._issue(_packed(value))

    def fail(self, poison: Poison) -> None:
        """Send an error in place of the operand."""
        self._issue(_packed(_Failed(poison.to_bytes())))

    def poll(self) -> bool:
        """True if all files have come."""
        return all(file.exists() for file in self._expected)

    def take(self) -> Any:
        """The value of the op; an error that came in its place is raised."""
        values = []
        for file in self._expected:
            values.append(torch.load(file, weights_only=False))
            file.unlink()
        for value in values:
            if isinstance(value, _Failed):
                raise Poison.from_bytes(value.content)
        result = values[0] if self._combine is None else self._combined(values)
        return result if self._into is None else self._into.copy_(result)

    def release(self) -> None:
        """Do nothing, since values are in memory of their own."""

    def _issue(self, content: bytes) -> None:
        for rank in self._to:
            self._mailbox.post(self._channel, rank, content)
        self._expected = [self._mailbox.next_file(self._channel, rank) for rank in self._reads]

    def _combined(self, values: list[Any]) -> Any:
        """This rank's outcome of the senders' values, as the op's `exchange` says."""
        exchange = self._combine.exchange
        if self._mailbox.rank not in exchange.receivers:
            return None
        position = exchange.members.index(self._mailbox.rank)
        pieces = [exchanges.cut(exchange, value, position) for value in values]
        return exchanges.combine(exchange, pieces)


def _packed(value: Any) -> bytes:
    """A tensor, or any object, as bytes."""
    if isinstance(value, torch.Tensor):
        value = value.clone()  # else the whole storage of a view is saved
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


class _Failed:
    """An error on its way."""

    def __init__(self, content: bytes) -> None:
        self.content = content
