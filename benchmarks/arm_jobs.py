"""Jobs of a benchmark's arms, one after another: each fails alone, and ends within a time."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetuning.processes import run
from provenance import provenance

OUTPUT = 8000
"""Characters of the output of a job that has failed."""


@dataclass(frozen=True)
class Job:
    """A process that measures an arm, and prints its figures as a line of JSON.

    Attributes:
        labels: of its row, such as the arm.
        command: behind the name of Python.
    """

    labels: dict[str, Any]
    command: Sequence[object]


@dataclass
class Record:
    """The rows of jobs so far.

    Attributes:
        file: where all rows go after each job; None: nowhere.
        about: what else goes there, such as the shape.
        rows: the labels and the figures of each job, or its error and its output.
    """

    file: Path | None
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, jobs: Sequence[Job], seconds: float) -> None:
        """Run all jobs within so many seconds, and add their rows; one takes half of it at most."""
        end = time.monotonic() + seconds
        for number, job in enumerate(jobs):
            left = end - time.monotonic()
            row = _row(job, left / min(2, len(jobs) - number))
            self.rows.append(row)
            self._write()
            outcome = row.get("error") or f"{statistics.median(row['ms']):.3f} ms"
            labels = ", ".join(map(str, job.labels.values()))
            print(f"{labels}: {outcome}; {row['job_s']} s", flush=True)

    def medians(self, **labels: object) -> dict[str, float]:
        """The median milliseconds of each arm, over samples of all its rows with such labels."""
        samples: dict[str, list[float]] = {}
        for row in self.rows:
            if "ms" in row and labels.items() <= row.items():
                samples.setdefault(row["arm"], []).extend(row["ms"])
        return {arm: statistics.median(times) for arm, times in samples.items()}

    def check_losses(self, tolerance: float, **labels: object) -> None:
        """Exit with an error if losses of rows with such labels differ by more than a part."""
        rows = [row for row in self.rows if "loss" in row and labels.items() <= row.items()]
        losses = {row["arm"]: row["loss"] for row in rows}
        if losses and not max(losses.values()) <= (1 + tolerance) * min(losses.values()):
            sys.exit(f"the arms disagree: {losses}")

    def check_errors(self) -> None:
        """Exit with the errors of jobs, if there are any."""
        if errors := [f"{row['arm']}: {row['error']}" for row in self.rows if "error" in row]:
            sys.exit("\n".join(errors))

    def _write(self) -> None:
        if self.file is not None:
            record = {**provenance(), **self.about, "rows": self.rows}
            self.file.write_text(json.dumps(record, indent=1) + "\n")


def _row(job: Job, limit: float) -> dict[str, Any]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, job.command)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output.log"
        began = time.monotonic()
        error = run(command, variables, log, limit)
        row = {**job.labels, "job_s": round(time.monotonic() - began, 1)}
        output = log.read_text(errors="replace")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if error or not lines:
        error = error or "it has ended without its figures"
        return {**row, "error": error, "output": output[-OUTPUT:]}
    return {**row, **json.loads(lines[-1])}
