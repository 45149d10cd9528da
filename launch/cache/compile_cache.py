"""The compile cache of a process: what it reads at once, and what it writes behind the first step.

A start that has nothing to read should take no longer for that. So texts are made and written by a
thread, when for some seconds nothing was traced, and no step ran for the first time, which settles
the code of its bodies. They are written at the latest when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...backends.base import World
from ...backends.per_world import PerWorld
from ..environment.config import config
from .entry_store import EntryStore

_LOG = logging.getLogger("cg")

PAUSE = 2.0
"""Seconds without a new trace or first run after which texts are written: a start is over then."""
PAUSES = 30
"""How long texts wait for graphs that do not run, in pauses."""

Write = Callable[[EntryStore], None]
"""Makes a text and writes it."""


@dataclass(eq=False)
class CompileCache:
    """The cache of a process; without a store it has nothing, and keeps nothing.

    Attributes:
        store: the files.
        torch_variables: the variables that torch reads, when the cache was opened.
    """

    store: EntryStore | None = None
    torch_variables: Mapping[str, str] = field(default_factory=dict)
    _pending: list[Write] = field(default_factory=list)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _writer: threading.Thread | None = None
    _changes: int = 0  # new texts, and first runs
    _awaited: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether anything is read or kept."""
        return self.store is not None

    def read(self, kind: str, key: str, most: int = 1) -> Iterator[str]:
        """The texts of a key, the youngest first, as `EntryStore.read` gives them."""
        if self.store is not None:
            yield from self.store.read(kind, key, most)

    def is_empty(self, kind: str) -> bool:
        """True if no text of a kind can be read."""
        return self.store is None or self.store.is_empty(kind)

    def keep(self, kind: str, key: str, make_text: Callable[[], str | None], most: int = 1) -> None:
        """Write a text later.

        Args:
            kind, key, most: as in `EntryStore.write`.
            make_text: makes the text when it is to be written; None: it has none after all.
        """

        def write(store: EntryStore) -> None:
            text = make_text()
            if text is not None:
                store.write(kind, key, text, most)

        if self.store is not None:
            self._pending.append(write)
            self._changes += 1

    def write_behind(self, has_run: Callable[[], bool] | None = None) -> None:
        """Write what is to be kept, in a thread, when for a while nothing was added to it.

        A further call counts as an addition, for what is kept may have changed. A process that ends
        before writes it itself.

        Args:
            has_run: whether a graph has run, where others start it; texts wait for that.
        """
        self._changes += 1
        if has_run is not None and self._pending:
            self._awaited.append(has_run)
        if self._pending and (self._writer is None or not self._writer.is_alive()):
            writer = threading.Thread(target=self._write, name="cg compile cache", daemon=True)
            self._writer = writer
            writer.start()

    def _write(self) -> None:
        pauses = 0
        while self._pending:
            before = self._changes
            time.sleep(PAUSE)
            pauses += 1
            for has_run in list(self._awaited):
                if has_run():
                    self._awaited.remove(has_run)
                    self._changes += 1
            if self._changes == before and (not self._awaited or pauses > PAUSES):
                self.flush()
                self._awaited.clear()

    def flush(self) -> None:
        """Write what is to be kept, now."""
        with self._writing:
            if self.store is None or not self._pending:
                return
            while self._pending:
                write = self._pending.pop(0)
                try:
                    write(self.store)
                except OSError as error:
                    _LOG.info("compile cache: cannot write to %s: %s", self.store.folder, error)
            self.store.make_room()


_CACHES: PerWorld[CompileCache] = PerWorld()


def cache_of(world: World) -> CompileCache:
    """The compile cache of a world's process, as CG_CACHE says at the first call."""
    return _CACHES.of(world, _opened)


def _opened() -> CompileCache:
    settings = config()
    if settings.cache is None:
        return CompileCache()
    cache = CompileCache(EntryStore(settings.cache), settings.torch_variables)
    atexit.register(cache.flush)
    return cache
