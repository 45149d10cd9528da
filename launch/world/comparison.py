"""Compare the arguments that ranks give to a step, which must be equal on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...backends.agreement.digests import digest, joined
from ...backends.base import World
from ...backends.cpu.control.control import Control
from ...ir.location import Location
from ...ir.text.differences import grouped, named
from ...tracer.record.session.inputs import InputError, InputSpec
from ...tracer.sampled import until_next
from .waiting import user_line


@dataclass(frozen=True)
class CallFacts:
    """A step that is called on all ranks together.

    Attributes:
        spec: its arguments.
        loc: its first line.
        words: the step and its arguments, in words.
        every: compare every n-th execution, from the first; 0: none; None: the executions that
            `ArgumentComparison` chooses.
    """

    spec: InputSpec
    loc: Location | None
    words: str
    every: int | None

    def comparison(
        self, world: World, control: Control, progress: Sequence[Callable[[], None]]
    ) -> ArgumentComparison | None:
        """Make the comparison of the ranks' arguments; None if there is nothing to compare."""
        if self.every == 0 or self.spec.place.is_single or not self.spec.tree.values:
            return None
        return ArgumentComparison(world, control, self, progress)


class ArgumentComparison:
    """Compares the arguments of some executions of a step, each before it runs.

    Without `check_inputs`, `until_next` chooses the executions. Ranks count them alike, so all
    ranks compare the same ones.

    Args:
        world: all ranks.
        control: of executions.
        call: the step, and how often to compare.
        progress: functions to call while waiting.
    """

    def __init__(
        self,
        world: World,
        control: Control,
        call: CallFacts,
        progress: Sequence[Callable[[], None]],
    ) -> None:
        self._world = world
        self._control = control
        self._call = call
        self._progress = progress
        self._number = 0
        self._left_out = 0  # executions from this comparison to the next
        self._unseen = 0  # executions since the last one that was compared and equal
        self._was_equal = False
        self._gives = world.rank in call.spec.place.ranks

    def plan_next(self) -> int:
        """Count on, and return after how many executions to compare again."""
        step = self._call.every or until_next(self._number)
        self._number += step
        self._unseen += self._left_out
        self._left_out = step - 1
        return step

    def compare(self, values: Sequence[Any]) -> None:
        """Return if all ranks have given the same arguments to this execution; collective.

        Args:
            values: of the program's parameters.

        Raises:
            InputError: ranks have given different arguments; on all ranks.
            RemoteError, StepTimeout, TransportError, PlanMismatch: another rank does not come.
        """
        digests = [digest(value) for value in values] if self._gives else []
        ranks = self._call.spec.place.ranks
        word = joined(digests) if self._gives else 0
        if not self._control.compare(word, ranks, self._progress):
            raise self._difference(self._world.allgather((digests, user_line())))
        self._was_equal, self._unseen = True, 0

    def _difference(self, everywhere: Sequence[tuple[list[int], str]]) -> InputError:
        """Make the error from each rank's digests of its arguments and its line of the call."""
        spec, loc = self._call.spec, self._call.loc
        names = [spec.names[index] for index in spec.tree.values]
        ranks = spec.place.ranks
        where = "" if loc is None else f", defined at {loc.file}:{loc.line}"
        differences = []
        for name, *digests in zip(names, *(everywhere[rank][0] for rank in ranks), strict=True):
            groups = grouped(digests).values()
            if len(groups) > 1:
                first, *rest = (named([ranks[index] for index in members]) for members in groups)
                differences.append(
                    f"{name} (one value on {first}, another on {', on '.join(rest)})"
                )
        several = len(differences) > 1
        lines = dict.fromkeys(everywhere[rank][1] for rank in ranks)
        return InputError(
            f"argument{'s' if several else ''} {', '.join(differences)} of {spec.step}() differ"
            f"{'' if several else 's'} between ranks in the call at {', or at '.join(lines)}"
            f"{where}. Nothing of the call has run. Each rank would compute with its own, so all "
            f"must give the same. {self._skipped()}If each rank loads by itself, seed the sampler "
            "alike on every rank, as in DataLoader(..., "
            "generator=torch.Generator().manual_seed(0)), and give each rank all of the data; or "
            "let the arguments of one rank count, by @cg.trace(inputs=cg.on(0)); or load the data "
            "in a method of an actor. If the difference does not matter, "
            "compile(check_inputs=False) does not look for it"
        )

    def _skipped(self) -> str:
        """Say why ranks may have different batches, if they had the same ones before."""
        if not self._was_equal:
            return ""
        since = ""
        if self._unseen:
            count = f"{self._unseen} call{'s' * (self._unseen != 1)}"
            since = (
                f"{count} since the last comparison may have mixed batches: go back to a "
                "checkpoint from before. "
            )
        return (
            "They were equal before, so a rank has perhaps skipped or repeated a call, and is a "
            "batch ahead or behind: look for an if, continue, break or except that one rank alone "
            f"takes. {since}"
        )
