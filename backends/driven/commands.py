"""Commands: the driver tells all other ranks to run graphs or close them, in one order for all.

A command is a number of 40 bits, so that a transport can publish it, together with a count, as one
word of 64.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

GRAPHS: Final = 1 << 18
VARIANTS: Final = 1 << 10
CONTEXTS: Final = 1 << 10
BITS: Final = 40


class CommandKind(enum.IntEnum):
    """The kind of a command."""

    EXECUTE = 1
    CLOSE = 2


@dataclass(frozen=True, slots=True)
class Command:
    """A command, unpacked.

    Attributes:
        kind: what to do.
        graph: the number of the graph in the world.
        variant: the index of the variant to execute.
        context: the index of the graph's execution context to use.
    """

    kind: CommandKind
    graph: int
    variant: int = 0
    context: int = 0

    def pack(self) -> int:
        """The command as a number of `BITS` bits, not 0."""
        return (
            ((self.kind * GRAPHS) + self.graph) * VARIANTS + self.variant
        ) * CONTEXTS + self.context

    @staticmethod
    def unpack(number: int) -> Command:
        """The inverse of `pack`."""
        rest, context = divmod(number, CONTEXTS)
        rest, variant = divmod(rest, VARIANTS)
        kind, graph = divmod(rest, GRAPHS)
        return Command(CommandKind(kind), graph, variant, context)


class CommandTransport(Protocol):
    """Carries commands from the driver to all other ranks, in order."""

    def publisher(self, to: Sequence[int], wake: Sequence[int]) -> Callable[[int], None]:
        """Make the function by which the driver tells other ranks of a command.

        The function may wait for a rank that lags far behind.

        Args:
            to: the ranks that the command concerns.
            wake: those of them that are woken if they sleep.
        """

    def reader(self, rank: int) -> Callable[[], int]:
        """Make the function that takes the next command for a rank of this process, or 0."""

    def mend(self) -> None:
        """On the driver: be ready for the next command after one that was interrupted."""


class VirtualCommands:
    """Commands in lists, for a process that plays all ranks."""

    def __init__(self) -> None:
        self._commands: dict[int, deque[int]] = {}

    def publisher(self, to: Sequence[int], wake: Sequence[int]) -> Callable[[int], None]:
        """Append commands to the lists of the ranks that they concern; nobody has to be woken."""
        lists = [self._of(rank) for rank in to]

        def put(command: int) -> None:
            for commands in lists:
                commands.append(command)

        return put

    def reader(self, rank: int) -> Callable[[], int]:
        """Take commands from the list of a rank."""
        commands = self._of(rank)

        def take() -> int:
            return commands.popleft() if commands else 0

        return take

    def mend(self) -> None:
        """Return: a command of a virtual world cannot be half done."""

    def _of(self, rank: int) -> deque[int]:
        return self._commands.setdefault(rank, deque())


Action = Callable[[], bool]
"""Does what a command asks of a rank; returns false if executions before it have to end first."""


class CommandQueue:
    """The commands of one driver for one rank.

    Args:
        rank: the rank that obeys them.
        read: takes the next command, or 0 (`CommandTransport.reader`).
        decode: returns the action of a command; called once for each different command.

    Attributes:
        rank: the rank that obeys them.
    """

    __slots__ = ("_actions", "_decode", "_held", "_read", "rank")

    def __init__(
        self, rank: int, read: Callable[[], int], decode: Callable[[int, Command], Action]
    ) -> None:
        self.rank = rank
        self._read = read
        self._decode = decode
        self._held = 0
        self._actions: dict[int, Action] = {}

    def take(self) -> bool:
        """Do what the next command asks for.

        False if there is no command, or it has to wait. A command waits only for executions before
        it, so it is always the next to be done.
        """
        command = self._held or self._read()
        if not command:
            return False
        self._held = 0
        action = self._actions.get(command)
        if action is None:
            action = self._actions[command] = self._decode(self.rank, Command.unpack(command))
        done = action()
        if not done:
            self._held = command
        return done

    def drop(self) -> int:
        """The next command, which will not be done, or 0."""
        command = self._held or self._read()
        self._held = 0
        return command

    def forget(self, graph: int) -> None:
        """Forget the actions of the graph with this number, which is closed."""
        for command in [r for r in self._actions if Command.unpack(r).graph == graph]:
            del self._actions[command]
