"""Options and fixtures that all tests share."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

import cg

from .mpi import jobs, warm
from .sampling import NAMED, covering

ROOT = Path(__file__).resolve().parent.parent

FORKS = "tests/backends/hccl/test_misuse.py"
"""Forks ranks with NPUs, ahead of all tests that give this process a fake device: torch has room
for one kind of device that it does not know."""

LONGEST = (
    "tests/examples/test_train_gpt.py",
    "tests/backends/hccl/test_jobs.py",
    "tests/examples/test_finetune.py",
    "tests/launch/test_jobs.py",
    "tests/mpi/test_devices.py",
    "tests/examples/serve/test_faults.py",
    "tests/examples/serve/test_hostile.py",
    "tests/examples/test_serve_engine.py",
    "tests/examples/test_serve_speculation.py",
    "tests/examples/test_serve_states.py",
    "tests/examples/serve/test_guides.py",
    "tests/examples/serve/test_expert_stages.py",
    "tests/mpi/test_executions.py",
    "tests/mpi/test_groups.py",
    "tests/mpi/test_hosts.py",
    "tests/mpi/test_equality.py",
    "tests/mpi/graphs/test_behaviours.py",
    "tests/mpi/test_pipelines.py",
    "tests/mpi/test_hangs.py",
    "tests/models/test_cut_layers.py",
    "tests/models/test_weights.py",
    "tests/tracer/groups/test_fsdp.py",
    "tests/tracer/groups/test_group_training.py",
    "tests/properties/test_oracle.py",
    "tests/tracer/groups/test_hf_training.py",
    "tests/properties/test_clipping.py",
    "tests/tracer/groups/test_random_training.py",
    "tests/properties/test_group_pipelines.py",
    "tests/properties/test_shapes.py",
    "tests/tracer/layouts/test_rules.py",
    "tests/tracer/groups/test_left_out_transfers.py",
    "tests/test_docs.py",
)
"""Files that take longest: those that start jobs, and those that do not; they begin in this order.

Any other file comes behind them.
"""

# How long an example takes says nothing of cg: the machine may be busy with other work.
settings.register_profile(
    "cg",
    max_examples=NAMED // 12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cg")
# Tests name numbers of examples: a default run draws a twelfth, `--slow` three times as many, and
# `--hypothesis-profile=thorough` sixty times.
settings.register_profile("slow", settings.get_profile("cg"), max_examples=3 * NAMED)
settings.register_profile("thorough", settings.get_profile("cg"), max_examples=60 * NAMED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected sections of tests/text/*.cg with what came out",
    )
    parser.addoption(
        "--slow",
        action="store_true",
        help="run the tests that take minutes, too: whole grids, 37 times the random examples",
    )
    parser.addoption(
        "--times",
        type=int,
        metavar="N",
        help="draw N times (more than 3) as many random examples as tests name; others for each "
        "--hypothesis-seed, so several processes can share a long search",
    )
    parser.addoption(
        "--wheel",
        action="store_true",
        help="insist that the installed wheel is tested, not this checkout",
    )
    parser.addoption(
        "--device",
        default="cpu",
        help="where test_on_the_host of tests/gpu runs documented commands: a value of CG_DEVICE",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another checkout's code, or the checkout where the wheel is meant.

    Tests stay on the host, wherever they run; those of GPUs say otherwise. They share no compile
    cache with the user, or with each other: it would hide faults of what is compiled afresh.
    """
    os.environ.setdefault("CG_DEVICE", "cpu")
    os.environ["CG_CACHE"] = ""  # tests of the cache say otherwise
    gc.set_threshold(*warm.THRESHOLDS)  # what collecting tests makes stays
    times = config.getoption("--times")
    if times is not None:
        count = NAMED * times
        settings.register_profile("times", settings.get_profile("cg"), max_examples=count)
        settings.load_profile("times")
    elif config.getoption("--slow") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("slow")
    here = Path(cg.__file__).resolve().parent == ROOT
    if config.getoption("--wheel") and here:
        raise pytest.UsageError(f"--wheel, but cg is imported from the checkout {ROOT}")
    if not config.getoption("--wheel") and not here:
        raise pytest.UsageError(
            f"cg is imported from {cg.__file__}, not from {ROOT}; run make setup in this checkout"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it of a job with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs are interrupted by it
    if config.getoption("numprocesses", None):  # of which this one hands out the tests
        os.environ[warm.INTERPRETERS] = jobs.start_interpreters()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and make the fake device known to torch.

    Torch makes its threads for the backwards of devices once, at the first backward of a process.
    It takes streams of one kind of device, so where it knows the fake one no GPU has a backward.
    """
    is_for_gpus = selects_gpus(item.config)
    if file_of(item.nodeid) != FORKS and not is_for_gpus:
        from cg.backends.fake import torch_backend

        torch_backend.register()
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    if not is_for_gpus:
        pytest.skip("needs -m gpu, which leaves out the fake device")
    import torch  # tests of GPUs have imported it; who hands out the tests does without

    needed = marker.args[0] if marker.args else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}")


def selects_gpus(config: pytest.Config) -> bool:
    """True in a run of the tests of GPUs, and of no others."""
    return bool(config.option.markexpr.startswith("gpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collect what the tests have left, and spare the collector what stays.

    At its end pytest collects ten times, to report what an object raises when it goes. With all
    that tests have made and caches hold, that took each process seconds.
    """
    for _ in range(2):
        gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    jobs.end_interpreters()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes under mpirun, and leave out what is slow."""
    if not config.getoption("--slow"):
        slow = {item for item in items if item.get_closest_marker("slow")}
        slow |= left_out_of_grids([item for item in items if item not in slow])
        config.hook.pytest_deselected(items=[item for item in items if item in slow])
        items[:] = [item for item in items if item not in slow]
    for item in items:
        if starts_jobs(item.nodeid):
            item.add_marker(pytest.mark.mpi)
    if hasattr(config, "workerinput"):
        longest_first(items)
    items.sort(key=lambda item: file_of(item.nodeid) != FORKS)


def left_out_of_grids(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked `grid` that only --slow runs."""
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in grids.values():
        marker = cases[0].get_closest_marker("grid")
        assert marker is not None
        chosen = covering([case.callspec.params for case in cases], *marker.args)
        left_out |= {case for number, case in enumerate(cases) if number not in set(chosen)}
    return left_out


def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the process: torch, and the tests themselves.

    Together with rarer searches through what is left, that saves an eighth of the time. Tests that
    run side by side have a thread each: of tensors as small as theirs, a second one takes nothing
    but another test's core.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


def longest_first(items: list[pytest.Item]) -> None:
    """Move what takes longest to the front, so that no process is left with it at the end."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(file_of(item.nodeid), len(places)))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many cases searches have drawn that count them, by `record_property`."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                counts.update({what: n for what, n in report.user_properties if type(n) is int})
    for what, count in counts.items():
        terminalreporter.write_line(f"{count:,} {what}")


def starts_jobs(nodeid: str) -> bool:
    """True if a test, or those of a file, may start processes under mpirun."""
    return _starts_jobs(file_of(nodeid))


@functools.cache
def _starts_jobs(name: str) -> bool:
    file = PurePosixPath(name)
    return file.parts[1] in ("mpi", "examples", "gpu") or file.name == "test_jobs.py"


class Lanes(LoadScopeScheduling):
    """Tests side by side: the first process does what starts no jobs, while the others do jobs.

    Ranks wait a lot, for each other and for deadlines, and what computes alone fills these gaps.
    Whoever has no more of its kind helps the others. One process does all of a file, whose tests
    share jobs and traces; but where `--times` makes a search long, its shards are handed out, and
    so are jobs on GPUs.
    """

    def _split_scope(self, nodeid: str) -> str:
        is_split = self.config.getoption("--times") or selects_gpus(self.config)
        return nodeid if is_split else file_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        does_jobs = node is not self.nodes[0]
        mine = (file for file in self.workqueue if starts_jobs(file) is does_jobs)
        self.workqueue.move_to_end(next(mine, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    """Makes what hands tests to processes under `--numprocesses`."""
    assert [file for file in LONGEST if not (ROOT / file).exists()] == []
    config.option.loadscopereorder = False  # `longest_first` has ordered them
    return Lanes(config, log)
