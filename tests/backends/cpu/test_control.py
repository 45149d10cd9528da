"""Executions end together on all ranks, or fail with one error; ranks here are threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cg.backends.cpu.control.control import Control
from cg.backends.cpu.control.hang_reporter import HangReporter
from cg.backends.cpu.control.rank_status import BarrierWord, State, StatusTable
from cg.backends.cpu.waiting.node import MachineNode
from cg.backends.device import Device
from cg.backends.errors import Failure, PlanMismatch, RemoteError, StepTimeout, TransportError
from cg.backends.failures.flight import FlightRecord, Position, Sight

from ..programs import exchange, module
from .world import ThreadWorld, run_ranks

PLAN = 0x1234


def run_controls(
    size: int, body: Callable[[Control, ThreadWorld], Any], sleep: float = 0.02
) -> list[Any]:
    def run(world: ThreadWorld) -> Any:
        node = MachineNode(world)
        control = Control(node, sleep)
        try:
            return body(control, world)
        finally:
            world.barrier()
            control.close()
            node.close()

    return run_ranks(size, run)


def at(rank: int, op: int = 0, awaited: int | None = None) -> Callable[[], Position]:
    return lambda: Position(rank, 0, op, awaited)


def in_pairs(positions: Sequence[Position]) -> FlightRecord:
    """Of a program in which two ranks send to each other."""
    return FlightRecord(module(exchange("send sent recv got", "recv got send sent")), positions)


def failure(rank: int, message: str = "boom") -> RemoteError:
    return RemoteError(Failure("ValueError", message, rank, "call(@stage.forward)"))


def wait_for_trouble(control: Control) -> BaseException:
    """The error that a rank notices that waits in vain."""
    try:
        for polls in range(1, 100_000):
            control.pause(polls)
    except (RemoteError, StepTimeout, TransportError, PlanMismatch) as error:
        return control.fail(error)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("has_device", [False, True])
def test_a_rank_looks_often_where_no_bell_rings(
    has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on a device ends without one, so the rank does not sleep until it is woken."""

    def body(control: Control, world: ThreadWorld) -> list[float]:
        if has_device:
            world.device = cast(Device, object())
        sleeps: list[float] = []
        monkeypatch.setattr(control._node.bell, "wait", sleeps.append)
        for polls in range(1, 400):
            control.pause(polls)
        return sleeps

    (sleeps,) = run_controls(1, body, sleep=30.0)
    assert len(sleeps) > 10
    assert max(sleeps) <= 0.005 if has_device else min(sleeps) == 30.0


def test_an_execution_begins_with_a_comparison_of_what_ranks_give() -> None:
    def body(control: Control, world: ThreadWorld) -> list[bool]:
        found = []
        for digest in (7, 7 + world.rank, 2**64 - 1):
            for ranks in ([0, 1, 2], [0, 2], [1]):
                control.begin(PLAN, at(world.rank))
                found.append(control.compare(digest, ranks))
                control.commit()
        return found

    assert run_controls(3, body) == [[True] * 3 + [False, False, True] + [True] * 3] * 3


def test_another_plan_is_an_error_at_the_comparison() -> None:
    def body(control: Control, world: ThreadWorld) -> str:
        control.begin(PLAN + world.rank, at(world.rank), doing=f"step {world.rank}")
        try:
            control.compare(1, [0, 1])
        except PlanMismatch as error:
            return str(control.fail(error))
        return ""

    for message in run_controls(2, body):
        assert "of plan 0000000000001234 on rank 0 (step 0), and of plan" in message


def test_a_rank_in_an_execution_and_one_in_a_call_of_the_world_notice_each_other() -> None:
    def body(control: Control, world: ThreadWorld) -> tuple[str, bool]:
        control.enter(1, "the trace of all")
        control.begin(PLAN, at(world.rank), doing="a step")
        control.commit()
        if world.rank != 1:
            control.begin(PLAN, at(world.rank), doing="another step")
            return str(wait_for_trouble(control)), control.diverged is not None
        control.enter(2, "the trace of one")
        with pytest.raises(PlanMismatch) as caught:
            look_on(control)
        with pytest.raises(TransportError, match="out of step since an earlier error"):
            control.enter(3, "another call")
        return str(caught.value), control.diverged is not None

    for message, diverged in run_controls(3, body):
        assert diverged
        assert "rank 1 is in the trace of one" in message
        assert re.search(r"rank [02] is in another step", message)


def test_a_rank_that_is_late_for_a_call_of_the_world_is_waited_for() -> None:
    def body(control: Control, world: ThreadWorld) -> None:
        for number in range(1, 20):
            control.enter(number, "a call")
            control.look()
            control.begin(PLAN, at(world.rank), doing="a step")
            control.check()
            control.commit()
            control.look()

    run_controls(3, body)


def look_on(control: Control) -> None:
    while True:
        control.look()
        time.sleep(0.001)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_commit_returns_when_all_have_come(size: int) -> None:
    entered = [0] * size

    def body(control: Control, world: ThreadWorld) -> list[int]:
        for execution in range(1, 30):
            assert control.begin(PLAN, at(world.rank)) == execution
            time.sleep(0.001 * ((world.rank + execution) % 3))
            entered[world.rank] = execution
            control.commit()
            assert min(entered) >= execution
        return entered

    run_controls(size, body)


def test_commit_makes_progress_for_others() -> None:
    def body(control: Control, world: ThreadWorld) -> int:
        calls = []
        control.begin(PLAN, at(world.rank))
        if world.rank == 1:
            while not progressed.is_set():
                time.sleep(0.001)
        control.commit([lambda: calls.append(progressed.set())])
        return len(calls)

    progressed = threading.Event()
    assert run_controls(2, body)[0] > 0


def test_a_failure_reaches_all_ranks_and_the_next_execution_is_even() -> None:
    def body(control: Control, world: ThreadWorld) -> Any:
        seen = []
        for failing in (2, 0, None, 1):
            if control.failed:
                control.recover([lambda: seen.append("reset")])
            control.begin(PLAN, at(world.rank))
            if failing is None:
                control.commit()
                continue
            if world.rank == failing:
                error = control.fail(failure(world.rank))
            else:
                error = wait_for_trouble(control)
            assert isinstance(error, RemoteError)
            seen.append((error.rank, error.failure.message))
        return seen

    expected = [(2, "boom"), "reset", (0, "boom"), "reset", (1, "boom")]
    assert run_controls(3, body) == [expected] * 3


def test_a_failure_ends_a_commit() -> None:
    def body(control: Control, world: ThreadWorld) -> Any:
        control.begin(PLAN, at(world.rank))
        if world.rank == 1:
            time.sleep(0.05)
            return control.fail(failure(1))
        with pytest.raises(RemoteError) as info:
            control.commit()
        assert control.failed
        return control.fail(info.value)

    errors = run_controls(3, body)
    assert [error.rank for error in errors] == [1, 1, 1]


def test_of_several_failures_all_ranks_raise_the_same() -> None:
    def body(control: Control, world: ThreadWorld) -> Any:
        for _ in range(10):
            control.begin(PLAN, at(world.rank))
            world.barrier()
            if world.rank in (1, 3):
                error = control.fail(failure(world.rank))
            else:
                error = wait_for_trouble(control)
            assert isinstance(error, RemoteError)
            assert error.rank == 1
            control.recover()

    run_controls(4, body)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (failure(0, "x" * 100_000), "x" * 100_000),
        (Unpicklable("odd"), "odd"),
        (StepTimeout("too late"), "too late"),
    ],
    ids=["large", "unpicklable", "timeout"],
)
def test_errors_of_all_kinds_are_told(error: Exception, text: str) -> None:
    def body(control: Control, world: ThreadWorld) -> Any:
        for _ in range(2):
            control.begin(PLAN, at(world.rank))
            told = control.fail(error) if world.rank == 0 else wait_for_trouble(control)
            assert text in str(told)
            control.recover()
        return type(told)

    kinds = run_controls(2, body)
    assert kinds[0] is type(error)
    assert kinds[1] is (RemoteError if isinstance(error, Unpicklable) else type(error))


@pytest.mark.parametrize("refuses", [(0,), (1,), (0, 1), ()])
def test_all_ranks_learn_whether_one_had_not_begun(refuses: tuple[int, ...]) -> None:
    def body(control: Control, world: ThreadWorld) -> list[bool]:
        found = []
        for refusing in (refuses, ()):
            control.begin(PLAN, at(world.rank))
            if world.rank in refusing or not refusing:
                control.fail(failure(world.rank), world.rank in refusing)
            else:
                wait_for_trouble(control)
            found.append(control.refused)
            control.recover()
        return found

    assert run_controls(2, body) == [[bool(refuses), False]] * 2


def test_what_recovers_may_call_the_world() -> None:
    """A rank that is slow to come to the call is not one that never will."""

    def body(control: Control, world: ThreadWorld) -> None:
        def call() -> None:
            if world.rank == 0:
                control.enter(1, "allgather")
                control.look()
            world.barrier()
            if world.rank == 1:
                control.enter(1, "allgather")

        control.begin(PLAN, at(world.rank))
        control.fail(failure(world.rank))
        control.recover([call])
        assert control.diverged is None

    run_controls(2, body)


def test_a_failed_execution_must_be_recovered_from() -> None:
    def body(control: Control, world: ThreadWorld) -> None:
        control.begin(PLAN, at(world.rank))
        control.fail(failure(world.rank))
        with pytest.raises(RuntimeError, match=r"has failed on all ranks: recover\(\) first"):
            control.begin(PLAN, at(world.rank))

    run_controls(2, body)


def test_another_plan_in_the_same_execution_is_an_error_not_a_hang() -> None:
    def body(control: Control, world: ThreadWorld) -> str:
        control.begin(0xAAAA if world.rank == 1 else 0xBBBB, at(world.rank))
        return str(wait_for_trouble(control))

    messages = run_controls(2, body)
    assert messages[0] == messages[1]
    plans = "of plan 000000000000bbbb on rank 0, and of plan 000000000000aaaa on rank 1"
    assert f"execution 0 is {plans}" in messages[0]
    assert "look for a call that depends on the rank" in messages[0]


def test_a_rank_that_has_ended_is_an_error_not_a_hang() -> None:
    def body(control: Control, world: ThreadWorld) -> str | None:
        control.begin(PLAN, at(world.rank))
        control.commit()
        if world.rank == 1:
            control.close()
            return None
        control.begin(PLAN, at(world.rank))
        return str(wait_for_trouble(control))

    message = run_controls(2, body)[0]
    assert "rank 1 has ended after execution 0, and the other ranks are in execution 1" in message


def test_what_a_far_rank_tells_of_its_end_says_what_it_has_ended_before() -> None:
    """The leader of its machine says that, too, but by messages that may come later."""

    def body(world: ThreadWorld) -> list[int] | None:
        node = MachineNode(world)
        try:
            return reached(StatusTable(node), world)
        finally:
            world.barrier()
            node.close()

    def reached(rows: StatusTable, world: ThreadWorld) -> list[int] | None:
        if world.rank == 1:
            told = []
            for epoch, state in ((2, State.RUNNING), (3, State.EXITED)):
                rows.reach(BarrierWord.COMMIT, epoch)
                rows.set_state(state)
                told.append(rows.status())
            world.allgather(told)
            rows.reach(BarrierWord.COMMIT, 0)
            world.barrier()
            return None
        early, late = world.allgather(None)[1]
        world.barrier()
        seen = []
        for news in (late, (BarrierWord.COMMIT, 2), early):
            if news is late or news is early:
                rows.note_status(1, news)
            else:
                rows.note_reached([1], *news)
            seen.append(rows.reached(1, BarrierWord.COMMIT))
        return seen

    assert run_ranks(2, body)[0] == [3, 3, 3]


def test_a_far_rank_is_at_its_inputs_only_with_what_it_gives() -> None:
    """The rank and the leader of its machine both say so, and either may be heard first."""

    def body(world: ThreadWorld) -> list[tuple[int, int]] | None:
        node = MachineNode(world)
        try:
            return given(StatusTable(node), world)
        finally:
            world.barrier()
            node.close()

    def given(rows: StatusTable, world: ThreadWorld) -> list[tuple[int, int]] | None:
        if world.rank == 1:
            told = []
            for epoch, digest in ((1, 70), (2, 50)):  # a smaller one counts as well
                rows.give(digest)
                rows.reach(BarrierWord.INPUTS, epoch)
                told.append(rows.status())
            world.allgather(told)
            rows.give(0)
            rows.reach(BarrierWord.INPUTS, 0)
            world.barrier()
            return None
        first, second = world.allgather(None)[1]
        world.barrier()
        seen = []
        for heard in (
            lambda: rows.note_status(1, first),
            lambda: rows.note_status(1, second),
            lambda: rows.note_reached([1], BarrierWord.INPUTS, 1, [70]),
            lambda: rows.note_reached([1], BarrierWord.COMMIT, 1, [70]),
            lambda: rows.note_reached([1], BarrierWord.INPUTS, 2, [50]),
            lambda: rows.note_reached([1], BarrierWord.INPUTS, 3, [60]),
            lambda: rows.note_status(1, second),
        ):
            heard()
            seen.append((rows.reached(1, BarrierWord.INPUTS), rows.digest(1)))
        return seen

    assert run_ranks(2, body)[0] == [(1, 70), *[(2, 50)] * 4, *[(3, 60)] * 2]


def test_nothing_is_told_after_the_last_word() -> None:
    """MPI wants every message to be received before it ends; nobody looks for one then."""

    def body(control: Control, world: ThreadWorld) -> list[str]:
        told: list[str] = []
        link: Any = SimpleNamespace(
            tell_leaders=lambda news: told.append("status"),
            part=lambda rank: told.append("goodbye"),
            receive=list,
        )
        control._link = link
        control._report()
        control.close()
        control._told = 0.0
        control._report()
        return told

    assert run_controls(1, body) == [["status", "status", "goodbye"]]


def test_a_rank_that_gives_up_while_the_others_go_on_is_named() -> None:
    def late() -> None:
        raise StepTimeout("in the same moment")

    def body(control: Control, world: ThreadWorld) -> str | None:
        control.begin(PLAN, at(world.rank))
        if world.rank == 1:
            with pytest.raises(StepTimeout):
                control.commit([late])
            world.barrier()
            world.barrier()
            control.fail(StepTimeout("in the same moment"))
            world.barrier()
            return None
        world.barrier()
        control.commit()
        world.barrier()
        world.barrier()
        control.begin(PLAN, at(world.rank))
        return str(wait_for_trouble(control))

    message = run_controls(2, body)[0]
    assert "rank 1 has given up execution 0, which the other ranks have finished" in message


def test_an_error_that_does_not_come_in_time_is_said_to_be_missing() -> None:
    def body(control: Control, world: ThreadWorld) -> str | None:
        control.begin(PLAN, at(world.rank))
        if world.rank == 1:
            control._errors.publish(1, None)  # as after an error of a third rank
            return None
        return str(wait_for_trouble(control))

    message = run_controls(2, body)[0]
    assert "execution 0 has failed on another rank, and its error has not come" in message


def test_a_rank_that_ends_after_the_last_step_is_fine() -> None:
    def body(control: Control, world: ThreadWorld) -> None:
        control.begin(PLAN, at(world.rank))
        if world.rank == 0:
            time.sleep(0.1)
        control.commit()
        control.close()

    run_controls(3, body)


def test_a_timeout_says_where_every_rank_is() -> None:
    def body(control: Control, world: ThreadWorld) -> str | None:
        control.begin(PLAN, at(world.rank))
        control.commit()
        if world.rank == 2:  # never enters the second execution
            world.barrier()
            return None
        if world.rank == 0:  # whose deadline begins when the other one is there
            assert second_has_begun.wait(60)
        timeout = 0.3 if world.rank == 0 else None
        control.begin(PLAN, at(world.rank, 1, 0), in_pairs, timeout=timeout)
        if world.rank == 1:
            second_has_begun.set()
        message = str(wait_for_trouble(control))
        world.barrier()
        return message

    second_has_begun = threading.Event()
    first, second, _ = run_controls(3, body)
    assert first == second
    assert "has not ended after 0.3 s" in first
    assert re.search(r"\n  rank 0 waits at .*\n  rank 1 waits at .*\n  rank 2 is outside", first)
    assert "rank 2 is outside of executions, after execution 0; it cannot be asked" in first


def test_ranks_are_described_by_their_answers_or_by_what_they_have_told() -> None:
    node: Any = SimpleNamespace(
        rank=0,
        is_local=lambda rank: rank < 3,
        process=lambda rank: f"process {100 + rank} on here",
        world=SimpleNamespace(look=lambda ranks, seconds: {1: Sight(f"rank 1, of {ranks}")}),
    )
    table: Any = SimpleNamespace(
        has_ended=lambda rank: rank == 4, whereabouts=lambda rank: f"rank {rank} is somewhere"
    )
    assert HangReporter(node, table).where(range(5)).splitlines() == [
        "  rank 0 is somewhere",
        "    it is process 100 on here",
        "  rank 1, of [0, 1, 2, 3]",
        "  rank 2 is somewhere; it cannot be asked",
        "    it is process 102 on here",
        "  rank 3 is somewhere; it cannot be asked, as those of other machines",
        "    it is process 103 on here",
        "  rank 4 is somewhere",
    ]


def test_a_rank_that_has_run_nothing_is_before_the_first_execution() -> None:
    def body(control: Control, world: ThreadWorld) -> list[str]:
        before = control._tell().text
        control.begin(PLAN, at(world.rank))
        control.commit()
        return [before, control._tell().text]

    before, after = run_controls(1, body)[0]
    assert before.startswith("rank 0 is outside of executions, before the first, for ")
    assert after.startswith("rank 0 is outside of executions, after execution 0, for ")


def test_a_rank_asked_ahead_of_its_program_or_at_its_end_says_so() -> None:
    def body(control: Control, world: ThreadWorld) -> list[str]:
        def ask() -> None:
            said.append(control._tell().text)

        said: list[str] = []
        control.begin(PLAN, lambda: Position(0, 0, 0, running=False), in_pairs)
        ask()
        control._table.reach(BarrierWord.COMMIT, control.epoch)
        ask()
        control.commit()
        return said

    ahead, ended = run_controls(1, body)[0]
    assert ahead.startswith("rank 0 is at work in execution 0, and has not waited")
    assert ended == "rank 0 has done its part of execution 0, and waits at its end for the others"


def test_recovery_does_not_wait_for_ever() -> None:
    def body(control: Control, world: ThreadWorld) -> None:
        control.begin(PLAN, at(world.rank))
        if world.rank == 0:
            control.fail(failure(0))
            with pytest.raises(StepTimeout, match=r"rank 0 has waited 0\.2 s for the other ranks"):
                control.recover(timeout=0.2)
        else:
            wait_for_trouble(control)
        world.barrier()

    run_controls(2, body)


def test_an_idle_rank_sleeps_and_wakes_at_once() -> None:
    def body(control: Control, world: ThreadWorld) -> int:
        polls: list[None] = []
        control.begin(PLAN, at(world.rank))
        if world.rank == 1:
            time.sleep(0.3)
        control.commit([lambda: polls.append(None)])
        return len(polls)

    assert run_controls(2, body, sleep=1000.0)[0] < 300  # only a ring can end the sleep
