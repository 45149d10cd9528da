"""Communicators by name, ours and third parties'."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from ...ir.ops.module import Channel
from ..base import Communicator, CommunicatorFactory, World
from ..errors import UnknownCommunicator

ENTRY_POINTS = "cg.communicators"
BUILT_IN = ("auto", "cpu", "mpi")  # names that users may write, too


class Registry:
    """Maps names to factories of communicators.

    A package adds one by an entry point of group `cg.communicators`, whose name is the name that
    users write and whose object is a `CommunicatorFactory`; it is loaded when first asked for.
    """

    def __init__(self, entry_points: str = ENTRY_POINTS) -> None:
        self._group = entry_points
        self._factories: dict[str, CommunicatorFactory] = {}

    def register(self, name: str, factory: CommunicatorFactory) -> None:
        """Add a factory.

        Raises:
            ValueError: the name is taken by another factory.
        """
        known = self._factories.get(name)
        if known is not None and known is not factory:
            raise ValueError(f"a communicator '{name}' is registered already: {known!r}")
        self._factories[name] = factory

    def names(self) -> tuple[str, ...]:
        """All names that `create` would take, sorted."""
        installed = {entry.name for entry in metadata.entry_points(group=self._group)}
        return tuple(sorted(installed | self._factories.keys()))

    def transports(self) -> tuple[str, ...]:
        """All names that a user may write in `cg.via`, sorted."""
        return tuple(sorted({*BUILT_IN, *self.names()}))

    def create(self, name: str, world: World, channels: Sequence[Channel]) -> Communicator:
        """Make this process's communicator `name` for `channels`; see `CommunicatorFactory`.

        Raises:
            UnknownCommunicator: no factory has that name.
        """
        return self._factory(name)(world, channels)

    def _factory(self, name: str) -> CommunicatorFactory:
        factory = self._factories.get(name)
        if factory is not None:
            return factory
        for entry in metadata.entry_points(group=self._group, name=name):
            loaded: CommunicatorFactory = entry.load()
            self.register(name, loaded)
            return loaded
        known = ", ".join(self.transports())
        raise UnknownCommunicator(
            f"there is no communicator '{name}'; known are: {known}. Values go through shared "
            "memory inside a machine by 'cpu', and by 'auto' where no device is concerned. A "
            f"package adds one by an entry point of group '{self._group}', a program by register()"
        )


COMMUNICATORS = Registry()
"""The communicators of this process."""

register = COMMUNICATORS.register
create = COMMUNICATORS.create
names = COMMUNICATORS.names
transports = COMMUNICATORS.transports
