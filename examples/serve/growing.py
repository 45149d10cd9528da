"""What engines have in common: variants of their graphs, which grow in number while they serve."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

import cg

from .gated import GatedGraphs
from .progress import said
from .variants import cheapest

log = logging.getLogger("serve")

Size = TypeVar("Size", bound=Any)
"""The size of a variant, with `holds` and `cost` as `variants.Size` says."""
WARM_UPS = {"cpu": 1, "accelerator": 3}
"""Executions of each variant in each context; the third one is recorded, on devices that can."""
SHARE = 0.1
"""The most of the time of a busy engine that goes to variants that are asked for."""
PRICE = 1.0
"""Seconds for which requests wait while a variant is made, until it is known of one."""
STEP = 0.02
"""Seconds of a step of a variant that has not run on padding."""
LEAST_SAVING = 0.05
"""Of a step, by a cheaper variant of as many tokens."""
SLICE = 0.05
"""Seconds after which a slice of making a variant ends, and with it the waiting of requests.

A slice has at least one step: to trace the variant, to bind it, or to run it once on padding.
"""


def warm_ups_on(device: torch.device | None) -> int:
    """How often a variant runs on padding on a device; None is the host."""
    return WARM_UPS["cpu" if device is None or device.type == "cpu" else "accelerator"]


class GrowingEngine(ABC, Generic[Size]):
    """Chooses and compiles the variants that serve work.

    Args:
        graphs: of the variants that are compiled.
        later: sizes that are compiled behind, the first ones first.
        warm_ups: how often a variant runs on padding before it is used.
        in_flight: executions of a graph at a time.

    Attributes:
        asked: about how many seconds work has taken because it was padded to a larger variant, by
            the size that would have served it.
        flying: executions in flight, and some that have ended.
        in_flight: executions of a graph at a time.
        longest_slice: the most seconds that requests have waited for `improve`.
    """

    def __init__(
        self, graphs: GatedGraphs[Size], later: Sequence[Size], warm_ups: int, in_flight: int
    ) -> None:
        self.graphs = graphs
        self.asked: defaultdict[Size, float] = defaultdict(float)
        self.flying: deque[cg.Future] = deque()
        self.in_flight = in_flight
        self.longest_slice = 0.0
        self._later, self._warm_ups = list(later), warm_ups
        self._serving: dict[Size, Size | None] = {}
        self._cold: set[Size] = set()  # that are begun, and not to be used yet
        self._growing: tuple[Size, Iterator[None]] | None = None
        self._rests_until = 0.0
        self._seconds: dict[Size, float] = {}  # of a step on padding
        self._price, self._spent = PRICE, 0.0  # of the latest variant; of the one that is begun

    @abstractmethod
    def examples(self, size: Size) -> list[tuple[Any, ...]]:
        """The arguments of each graph of a variant, of padding alone."""

    @abstractmethod
    def may_serve(self, size: Size, ideal: Size) -> bool:
        """True if a variant may serve work of another size, which it has to hold."""

    @abstractmethod
    def general(self, ideal: Size) -> Size:
        """The size that is compiled where no variant holds work of a size."""

    @property
    def usable(self) -> list[Size]:
        """The variants that serve work: those that are compiled, and have run on padding."""
        return [size for size in self.graphs.compiled if size not in self._cold]

    def close(self) -> None:
        """End the executions in flight, then the ranks; idempotent."""
        self.graphs.close()

    def drop_ended(self) -> None:
        """Forget the oldest executions if they have ended."""
        while self.flying and self.flying[0].done():
            self.flying.popleft()

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have a thread call when `due` may have become true without any work."""
        self.graphs.when_ready = call

    def due(self, idle: bool) -> bool:
        """True if `improve` is to be called as soon as nothing is in flight.

        While there is work, variants are made if padding has taken as long as requests will wait
        for one, and in a `SHARE` of the time: so what they lose is about twice what they would with
        the better of both choices, known ahead (ski rental; Karlin, Manasse, Rudolph, Sleator,
        "Competitive Snoopy Caching", 1988). One that an idle engine has begun waits as well.
        Nothing is due while kernels are made, which is beside the work.
        """
        if not self.graphs.is_ready:
            return False
        if idle:
            return bool(self._growing or self.asked or self._later)
        pays = max(self.asked.values(), default=-1.0) >= self._price
        return pays and monotonic() >= self._rests_until

    def improve(self) -> bool:
        """Go on with the variant that is begun, or begin the one that would have saved most.

        Nothing may be in flight. It ends after a slice.

        Returns:
            True if the variant is complete.
        """
        began = monotonic()
        self._end_flying()
        if self._growing is None:
            size = max(self.asked, key=self.asked.__getitem__) if self.asked else self._later[0]
            log.info("compiling %s", size)
            self._growing = size, self._steps(size)
        (_, steps), is_complete = self._growing, False
        while self.graphs.is_ready:
            is_complete = next(steps, True) is not None
            if is_complete:
                self._growing = None
                self._say_number()
            if is_complete or monotonic() - began > SLICE:
                break
        seconds = monotonic() - began
        self.rest(seconds)
        self.longest_slice = max(self.longest_slice, seconds)
        self._spent += seconds
        if is_complete:
            self._price, self._spent = self._spent, 0.0
        return is_complete

    def add(self, size: Size) -> None:
        """Compile a variant once all that is in flight has ended, and use it from now on."""
        began = monotonic()
        self._end_flying()
        steps = self._steps(size)
        if self._growing is not None and self._growing[0] == size:
            (_, steps), self._growing, self._spent = self._growing, None, 0.0
        with said(f"compiling {size}"):
            deque(steps, maxlen=0)
        self.rest(monotonic() - began)

    def rest(self, seconds: float) -> None:
        """Compile nothing beside work for as long as makes these seconds a `SHARE` of the time."""
        self._rests_until = monotonic() + seconds * (1 / SHARE - 1)

    def warm(self, size: Size) -> None:
        """Run a compiled variant in each of its contexts, on padding, and use it from now on."""
        deque(self._warming(size), maxlen=0)

    def _steps(self, size: Size) -> Iterator[None]:
        """Make a variant, and use it from now on; other work may be done between two steps."""
        self._cold.add(size)
        while size not in self.graphs.compiled:
            self.graphs.advance(size)
            if size not in self.graphs.compiled:
                yield
        yield from self._warming(size)

    def _warming(self, size: Size) -> Iterator[None]:
        runs = self._warm_ups and self._warm_ups + 1
        for graph, work in zip(self.graphs.compiled[size], self.examples(size), strict=True):
            for _ in range(runs):
                yield
                began = monotonic()
                futures = [graph.execute(*work) for _ in range(self.in_flight)]
                for future in futures:
                    future.result()
                # The last one stays: it is as those of work are.
                self._seconds[size] = (monotonic() - began) / self.in_flight
        self._cold.discard(size)
        self._serving.clear()
        served = (other for other in self.asked if self.may_serve(size, other))
        for other in [other for other in served if size.holds(other)]:
            del self.asked[other]
        self._later = [other for other in self._later if other != size]

    def _end_flying(self) -> None:
        while self.flying:
            self.flying.popleft().exception()

    def _say_number(self) -> None:
        left = len(self._later)
        log.info(
            "%d variants are compiled%s",
            len(self.usable),
            f", {left} of those that are likely to be asked for are left" if left else "",
        )

    def variant(self, ideal: Size) -> Any:
        """The cheapest compiled variant that holds work of a size; None if there is none."""
        if ideal not in self._serving:
            usable = (size for size in self.usable if self.may_serve(size, ideal))
            self._serving[ideal] = cheapest(usable, ideal)
        size = self._serving[ideal]
        if size is not None and size != ideal:
            self.asked[ideal] += self._saving(size, ideal)
        return size

    def seconds(self, size: Size) -> float:
        """Of a step of a variant."""
        return self._seconds.get(size, STEP)

    def _saving(self, size: Size, ideal: Size) -> float:
        """About how many seconds a step of a variant takes longer than one of a cheaper size.

        Time is a line over cost, through this variant and the nearest one of its kind that has run
        on padding; if there is none, time is in proportion to cost.
        """
        seconds, cost = self.seconds(size), size.cost[0]
        alike = [other for other in self._seconds if type(other) is type(size)]
        others = [other for other in alike if other.cost[0] != cost]
        by_cost = seconds / cost
        if others:
            near = min(others, key=lambda other: abs(other.cost[0] - cost))
            by_cost = (seconds - self.seconds(near)) / (cost - near.cost[0])
        return max(by_cost * (cost - ideal.cost[0]), LEAST_SAVING * seconds)

    def needed(self, ideal: Size) -> Any:
        """The same; one is compiled if there is none."""
        size = self.variant(ideal)
        if size is None:
            size = self.general(ideal)
            self.add(size)
        return size
