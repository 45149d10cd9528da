"""Start a job again when it has failed, until it ends well, or fails in the same place twice.

In: how to start it on so many ranks. Out: its exit code, and a report of each fault.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .failure import INTERRUPTED
from .job import Job
from .launcher import LaunchError
from .rank_registry import RankRegistry
from .shm_cleanup import remove_unused

REPORTED = 15
"""The last lines of a report that are shown once more."""
TOLD = ("CG_RANK_REGISTRY", "CG_RESTARTS")
"""The variables that a start tells its ranks."""


@dataclass(frozen=True)
class Start:
    """A start of a job.

    Attributes:
        ranks: how many it has.
        command: the command line.
        environment: of that.
        is_near: whether all ranks are on this machine, so that the registry knows all of them.
    """

    ranks: int
    command: Sequence[str]
    environment: Mapping[str, str]
    is_near: bool


@dataclass(frozen=True)
class Fault:
    """A start that has failed.

    Attributes:
        ranks: how many it had.
        code: its exit code.
        steps: for each step the execution that was the last to begin, from 0; None if ranks are on
            other machines, and none of this one has told.
        report: the words of the rank that ended it; None if there are none.
        is_death: whether a rank has died without a word, and no rank has given another reason.
        has_begun: whether the ranks had met.
    """

    ranks: int
    code: int
    steps: Mapping[str, int] | None
    report: str | None
    is_death: bool
    has_begun: bool

    def repeats(self, earlier: Fault) -> bool:
        """True if as many ranks failed in the same way, when all steps had come as far.

        A rank that dies without a word before the first execution is in no step.
        """
        if self.steps is None or (self.is_death and not self.steps):
            return False
        return self._kind == earlier._kind

    @property
    def has_run(self) -> bool:
        """Whether an execution of a step had begun, or nobody knows."""
        return self.has_begun and self.steps != {}

    @property
    def _kind(self) -> tuple[object, ...]:
        # After a death the code is that of the launcher, or of a rank that has noticed it before.
        return self.ranks, self.steps, self.is_death, None if self.is_death else self.code

    def __str__(self) -> str:
        if self.steps is None:
            where = "in a step that is not known, on other machines"
        elif not self.steps:
            where = "before the first execution of a step"
        else:
            where = "in execution " + ", ".join(f"{n} of {s}" for s, n in self.steps.items())
        return f"exit code {self.code} on {_counted(self.ranks, 'rank')}, {where}"


@dataclass(frozen=True)
class RestartPolicy:
    """The user's wish for a job that fails.

    Attributes:
        most: how often it is started again.
        ranks: the numbers of ranks that it may have; None: always that of its first start.
    """

    most: int = 0
    ranks: range | None = None

    @staticmethod
    def of(restarts: str | None, elastic: str | None, ranks: int) -> RestartPolicy:
        """Read the options of the launcher.

        Raises:
            LaunchError: they say nothing that can be done.
        """
        if restarts is None:
            if elastic is not None:
                raise LaunchError(
                    "--elastic says on how many ranks to start again: give --restarts"
                )
            return RestartPolicy()
        if not re.fullmatch(r"[0-9]{1,9}", restarts):
            raise LaunchError(f"--restarts {restarts}: it is a whole number of at least 0")
        if elastic is None:
            return RestartPolicy(int(restarts))
        bounds = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", elastic)
        if bounds is None or not 1 <= int(bounds[1]) <= ranks <= int(bounds[2]):
            raise LaunchError(
                f"--elastic {elastic}: it is MIN:MAX, the fewest and the most ranks, as 2:8, with "
                f"1 <= MIN <= {ranks} <= MAX for -n {ranks}"
            )
        return RestartPolicy(int(restarts), range(int(bounds[1]), int(bounds[2]) + 1))

    def left(self, fault: Fault, slots: int | None) -> int:
        """The number of ranks for the start after a fault.

        Args:
            fault: the last one.
            slots: room for ranks on the hosts that answer; None if the job runs on this machine.
                Here a rank that has died without a word is left out, but for the fewest ranks.

        Raises:
            LaunchError: there is too little room.
        """
        if self.ranks is None:
            return fault.ranks
        if slots is None:
            died = fault.is_death and fault.has_begun
            return max(self.ranks[0], fault.ranks - died)
        if slots < self.ranks[0]:
            raise LaunchError(
                f"hosts that answer have room for {_counted(slots, 'rank')}, and --elastic wants "
                f"at least {self.ranks[0]}"
            )
        return min(self.ranks[-1], slots)


@dataclass
class Supervisor:
    """Starts a job as often as a policy allows, and says why.

    Attributes:
        job: runs its commands.
        policy: of the user.
        start: makes the start after a fault; told of None, the first.
        restarts: how often ranks that had executed a step were started again, also before this
            process.
        faults: of the starts so far.
    """

    job: Job
    policy: RestartPolicy
    start: Callable[[Fault | None], Start]
    restarts: int = 0
    faults: list[Fault] = field(default_factory=list)

    def run(self) -> int:
        """Run the job to its end; returns its exit code.

        Raises:
            LaunchError: it cannot be started for the first time.
        """
        start = self.start(None)
        while True:
            fault = self._run_once(start)
            if fault is None:
                return 0
            self.faults.append(fault)
            if not self._goes_on(fault):
                return fault.code
            self.restarts += fault.has_run
            try:
                start = self.start(fault)
            except LaunchError as error:
                _say(str(error))
                return fault.code

    def _run_once(self, start: Start) -> Fault | None:
        """Run a start; returns how it has failed, if it has."""
        began = time.time()
        with tempfile.TemporaryDirectory(prefix="cg-job-") as folder:
            registry = RankRegistry(Path(folder))
            variables = dict(zip(TOLD, (folder, str(self.restarts)), strict=True))
            code = self.job.run(start.command, {**start.environment, **variables})
            lost = ", ".join(map(str, registry.present()))
            if code == 0 and lost:
                code = 1
                _say(
                    f"the job has ended in the middle of its work, on rank {lost}: one of them "
                    "ended with exit code 0 and did not leave the job, as os._exit(0) does, and "
                    "the others were ended with it. Use sys.exit, or raise an error"
                )
            if code == 0:
                return None
            remove_unused(since=began)
            has_begun, steps = registry.has_begun(), registry.steps()
            is_known = start.is_near or has_begun
            report = registry.first_report()
            return Fault(
                start.ranks,
                code,
                steps if is_known else None,
                report or registry.first_report(of_death=True),
                report is None,
                has_begun or not is_known,
            )

    def _goes_on(self, fault: Fault) -> bool:
        """Say what comes of a fault; true if the job is started again."""
        count = len(self.faults)
        if self.job.ended_by is not None:
            _say(f"{self.job.ended_by.name} ended all {fault.ranks} ranks")
        elif not self.policy.most:
            _say(f"the job has ended with exit code {fault.code}")
        elif fault.code == INTERRUPTED:
            _say(f"{signal.SIGINT.name} ended a rank, and so the job: it is not started again")
        elif count > 1 and fault.repeats(self.faults[-2]):
            _say(
                f"the job has ended with {fault}, as in the start before, so it is not started "
                "again. The reports of both:" + "".join(map(self._report, (count - 1, count)))
            )
        elif count > self.policy.most:
            _say(
                f"the job has ended with {fault}, and has been started again "
                f"{_counted(self.policy.most, 'time')}, as often as --restarts says"
            )
        else:
            _say(
                f"the job has ended with {fault}. It starts again, for time {count} of "
                f"{self.policy.most}"
            )
            return True
        return False

    def _report(self, number: int) -> str:
        fault = self.faults[number - 1]
        report = fault.report or "no rank has said why; look at what is written above"
        lines = "".join(f"\n    {line}" for line in report.splitlines()[-REPORTED:])
        return f"\n  start {number}: {fault}{lines}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _say(text: str) -> None:
    print(f"cg.launch: {text}", file=sys.stderr, flush=True)
