"""Traces of methods in the compile cache, under a key that holds torch, its settings and cg."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...backends.per_world import PerWorld
from ...tracer.method.alike import Traces
from ...tracer.method.stored.plain_text import NotStorable
from ..world.world import world
from .compile_cache import CompileCache, cache_of
from .torch_build import Replaced, TorchBuild

_LOG = logging.getLogger("cg")
_KIND = "traces"
_MANY = 3
"""The most traces that are kept under one key, and compared with a call."""


_BUILDS: PerWorld[TorchBuild] = PerWorld()


def new_traces() -> Traces:
    """The traces of a step that has none so far, with those of earlier starts behind them."""
    cache = cache_of(world())
    if not cache.is_on:
        return Traces()
    build = _BUILDS.of(world(), lambda: TorchBuild(cache.torch_variables))
    return Traces(StoredTraces(cache, build))


@dataclass(frozen=True)
class StoredTraces:
    """The traces that earlier starts have kept; implements `TraceStore`.

    Attributes:
        cache: has them.
        build: says what functions of torch depend on beside their arguments.
    """

    cache: CompileCache
    build: TorchBuild

    @property
    def is_empty(self) -> bool:
        """True if there are no traces, so that no key is needed."""
        return self.cache.is_empty(_KIND)

    def read(self, key: str) -> Iterator[str]:
        """The texts of traces with a key, the youngest first; none if torch is not torch's own."""
        if self.is_empty:
            return
        try:
            build = self.build.text()
        except Replaced:
            return  # the reason is given where the trace would be kept
        yield from self.cache.read(_KIND, f"{build}\0{key}", _MANY)

    def keep(self, key: str, make_text: Callable[[], str]) -> None:
        """Keep a trace, unless it has no text, or torch is not torch's own."""

        def text() -> str | None:
            try:
                return make_text()
            except NotStorable as reason:
                _LOG.info("compile cache: a method's trace is not kept: %s", reason)
                return None

        try:
            build = self.build.text()
        except Replaced as reason:
            _LOG.info("compile cache: a method's trace is not kept: %s", reason)
            return
        self.cache.keep(_KIND, f"{build}\0{key}", text, _MANY)

    def take(self, call: str) -> None:
        """Say that a call has the trace of an earlier start."""
        _LOG.debug("compile cache: %s has the trace of an earlier start", call)

    def mend(self, call: str, reason: str) -> None:
        """Say why a part of a trace that a call has is made anew."""
        _LOG.info("compile cache: a part of the trace of %s is made anew: %s", call, reason)

    def leave_out(self, call: str, reason: str) -> None:
        """Say why a call is not kept, or why kept traces do not serve it."""
        _LOG.info("compile cache: %s is traced anew: %s", call, reason)
