"""Choose for how long stored parameters stay gathered: as long as the memory of ranks allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.attributes import Effect
from ...ir.location import Location
from ...ir.ops import Call
from ...ir.ops.module import Module
from ..frontend.buckets import bucket_of, unmatched
from ..frontend.fsdp import STEP, TASK, Fsdp, stored_parameters
from .memory_plan import memory_plan

AUTO = "auto"
KEEPS = (STEP, TASK, AUTO)


class ResidencyError(ValueError):
    """Stored parameters cannot be gathered as `cg.fsdp` asks.

    Attributes:
        reason: what is wrong.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")


@dataclass(frozen=True)
class Residency:
    """The way in which stored parameters are gathered; `cg.fsdp` makes it.

    Attributes:
        bucket: the patterns of buckets, as in `bucket_of`.
        keep: `step`, `task` or `auto`.
        memory: the most bytes that each rank's program may hold, by `memory_plan`; None: any.
        prefetch: how many calls before its use a bucket is gathered.
        separate: whether gathers and reductions have communicators and streams of their own.
        loc: the user's line that made it.
    """

    bucket: str = ""
    keep: str = AUTO
    memory: int | None = None
    prefetch: int = 1
    separate: bool = True
    loc: Location | None = None

    @property
    def text(self) -> str:
        """The options as text, for comparison between ranks."""
        return (
            f"fsdp(bucket={self.bucket!r}, keep={self.keep!r}, memory={self.memory}, "
            f"prefetch={self.prefetch}, separate={self.separate})"
        )

    def check(self, module: Module) -> None:
        """Check that a traced step has stored parameters, and that each pattern matches one.

        Raises:
            ResidencyError: the step has none, or a pattern matches none of them.
        """
        paths = sorted(stored_parameters(module))
        if not paths:
            raise ResidencyError(
                f"fsdp= is given for step {module.name}, and none of the methods that it traces "
                "uses a parameter which its actor stores in pieces",
                "compile a step that calls no such method without fsdp=, as one that only updates; "
                'an actor stores pieces by store=, as in Stage.on(mesh, store=cg.cut(0, "dp")), on '
                "a mesh whose axis is longer than 1",
            )
        if missing := unmatched(self.bucket, paths):
            shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ResidencyError(
                f"the bucket '{missing[0]}' matches no parameter that step {module.name} stores in "
                "pieces",
                f"these are {shown}; a pattern goes name by name, as 'blocks.*' does",
            )

    def choose(self, module: Module, compiled: Callable[[Fsdp], Module]) -> Fsdp:
        """The pass that keeps as many buckets for a whole step as the memory of their ranks allows.

        If memory is short, gradients are reduced in each task first: that saves as many bytes as
        gathering parameters in each task, and costs less traffic. Then parameters are gathered in
        each task. In both cases the buckets that a step uses first come first, as they would stay
        longest. The number of buckets is found by bisection, for each actor by itself, so that all
        of the actor's ranks have enough memory.

        Args:
            module: the traced module.
            compiled: a function that compiles it with a pass, and returns the scheduled module.

        Raises:
            ResidencyError: as in `check`; or no choice fits into the memory.
        """
        self.check(module)
        keep = TASK if self.keep == TASK else STEP
        fsdp = Fsdp(self.bucket, keep, separate=self.separate)
        if self.memory is None:
            return fsdp
        if self.keep != AUTO:
            self._expect_fit(compiled(fsdp))
            return fsdp
        demotions = {actor: tuple(_demotions(b)) for actor, b in _buckets(self, module).items()}
        chosen = self._fewest(fsdp, demotions, compiled)
        scheduled = compiled(chosen)
        if not all(self._fits(scheduled, rank) for rank in range(scheduled.world)):
            # The bisections of actors on one rank have run side by side, so together they may
            # have demoted too little.
            chosen = _demoted(fsdp, demotions, {a: len(d) for a, d in demotions.items()})
            scheduled = compiled(chosen)
        self._expect_fit(scheduled)
        return chosen

    def _fewest(
        self,
        fsdp: Fsdp,
        demotions: Mapping[str, Sequence[tuple[str, str]]],
        compiled: Callable[[Fsdp], Module],
    ) -> Fsdp:
        """The pass with the fewest demotions for each actor that let its ranks' programs fit."""
        low = dict.fromkeys(demotions, -1)  # known to be too few
        high = {actor: len(steps) for actor, steps in demotions.items()}
        trial = dict.fromkeys(demotions, 0)
        while any(high[actor] - low[actor] > 1 for actor in demotions):
            scheduled = compiled(_demoted(fsdp, demotions, trial))
            ranks = _ranks(scheduled)
            for actor in demotions:
                if high[actor] - low[actor] > 1:
                    fits = all(self._fits(scheduled, rank) for rank in ranks.get(actor, ()))
                    (high if fits else low)[actor] = trial[actor]
                is_open = high[actor] - low[actor] > 1
                trial[actor] = (high[actor] + low[actor]) // 2 if is_open else high[actor]
        return _demoted(fsdp, demotions, high)

    def _fits(self, module: Module, rank: int) -> bool:
        return self.memory is None or memory_plan(module, rank).peak <= self.memory

    def _expect_fit(self, module: Module) -> None:
        peaks = {rank: memory_plan(module, rank).peak for rank in range(module.world)}
        worst = max(peaks, key=peaks.__getitem__)
        assert self.memory is not None, "there is a bound"
        if peaks[worst] > self.memory:
            least = (
                " even where every bucket is gathered for each task" if self.keep == AUTO else ""
            )
            advice = "" if self.keep != STEP else "keep='auto', "
            raise ResidencyError(
                f"fsdp= allows {self.memory} bytes, and the program of rank {worst} holds "
                f"{peaks[worst]} at its peak{least}, as memory_analysis() counts",
                f"give more memory, {advice}smaller microbatches or buckets, a shorter prefetch, "
                "or more ranks along the axis that store= cuts",
            )


def _buckets(residency: Residency, module: Module) -> Mapping[str, Sequence[str]]:
    """The buckets of each actor, in the order in which the step first uses them."""
    buckets_of: dict[str, dict[str, None]] = {}
    functions = module.functions
    for op in module.program.ops:
        if not isinstance(op, Call):
            continue
        names = [op.fn.name]
        if op.vjp is not None:
            names.insert(0, module.vjps[op.vjp.name].forward)
        for name in names:
            for inner in module.bodies[name].ops if name in module.bodies else ():
                if not isinstance(inner, Call):
                    continue
                function = functions[inner.fn.name]
                if function.parameter is not None and function.effect is Effect.READ:
                    bucket = bucket_of(function.parameter, residency.bucket)
                    buckets_of.setdefault(function.actor or "", {})[bucket] = None
    return {actor: tuple(buckets) for actor, buckets in buckets_of.items()}


def _demotions(buckets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The demotions in order: pairs of a field of the pass, and a bucket to list in it."""
    for field in ("reduce", "regather"):
        for bucket in buckets:
            yield field, bucket


def _demoted(
    fsdp: Fsdp, steps: Mapping[str, Sequence[tuple[str, str]]], counts: Mapping[str, int]
) -> Fsdp:
    """The pass with the first few demotions of each actor.

    Args:
        fsdp: the pass without demotions.
        steps: the demotions of each actor, in order.
        counts: how many of them to apply, for each actor.
    """
    listed: dict[str, list[str]] = {"reduce": [], "regather": []}
    for actor, demotions in steps.items():
        for field, bucket in demotions[: counts[actor]]:
            listed[field].append(f"{actor}/{bucket}")
    return replace(fsdp, reduce="+".join(listed["reduce"]), regather="+".join(listed["regather"]))


def _ranks(module: Module) -> Mapping[str, Sequence[int]]:
    """The ranks of each actor of a scheduled module."""
    ranks_of: dict[str, dict[int, None]] = {}
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Call) and (actor := module.functions[op.fn.name].actor) is not None:
                ranks_of.setdefault(actor, {})[program.rank or 0] = None
    return {actor: tuple(ranks) for actor, ranks in ranks_of.items()}
