"""Schedules as text tables, and compact rows against plain lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Task
from cg.ir.pipeline.order import TaskRow, numbers
from cg.passes import schedules
from cg.passes.schedules import Pipeline

TABLE = """
# two stages, two microbatches
0F0 0F1 0B0 0B1   # rank 0
1F0 1B0 1F1 1B1
"""


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]))
def test_a_table_of_a_schedule_is_that_schedule(p: int, m: int, name: str) -> None:
    pipeline = Pipeline(tuple(range(p)), m)
    order = schedules.by_name(name)(pipeline)
    text = schedules.format_table(order)
    assert schedules.table(text)(pipeline) == order
    assert schedules.table_pipeline(text) == pipeline


def test_lines_are_ranks_in_turn_and_comments_are_skipped() -> None:
    order = schedules.table(TABLE)(Pipeline((0, 1), 2))
    assert [str(task) for task in order[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert [str(task) for task in order[1]] == ["1F0", "1B0", "1F1", "1B1"]


def test_lines_may_name_their_rank() -> None:
    text = "3: 0F0 0B0\n1: 1F0 1B0\n"
    assert list(schedules.table(text)(Pipeline((3, 1), 1))) == [3, 1]
    assert schedules.table_pipeline(text) == Pipeline((3, 1), 1)


def test_a_printed_grid_is_a_table() -> None:
    grid = """
    rank  0 | 0F0 0F1 .   .   0B0 0B1
    rank 10 | .   1F0 1F1 1B0 .   1B1
    """
    order = schedules.table(grid)(Pipeline((0, 10), 2))
    assert [str(task) for task in order[10]] == ["1F0", "1F1", "1B0", "1B1"]
    assert schedules.table_pipeline(grid) == Pipeline((0, 10), 2)


def test_b_comes_ahead_of_a_w_that_is_alone() -> None:
    schedule = schedules.table("rank 0 | 0F0 .   0W0\nrank 1 | .   1F0 1B0 1W0")
    assert schedule.splits
    order = schedule(Pipeline((0, 1), 1))
    assert [str(task) for task in order[0]] == ["0F0", "0B0", "0W0"]
    assert [str(task) for task in order[1]] == ["1F0", "1B0", "1W0"]


def test_a_table_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TABLE)
    schedule = schedules.from_file(path)
    assert schedule.name == str(path)
    assert schedule(Pipeline((0, 1), 2)) == schedules.table(TABLE)(Pipeline((0, 1), 2))


def test_a_file_is_text_in_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TABLE, encoding="utf-8-sig")
    assert schedules.from_file(path)(Pipeline((0, 1), 2)) == schedules.table(TABLE)(
        Pipeline((0, 1), 2)
    )
    path.write_text(TABLE, encoding="utf-16")
    with pytest.raises(ValueError, match=r"mine\.txt is not a text file: .* can't decode"):
        schedules.from_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n1F0 1X0", "mine:2: '1X0' is not a task; write stage, F|B|W, microbatch"),
        ("0: 0F0 0B0\n0: 1F0", "mine:2: rank 0 has a line already"),
        ("zero: 0F0", "mine:1: 'zero' is not a rank"),
        ("# nothing\n", "mine: no rank has a line"),
        ("", "mine: no rank has a line"),
        ("0: # later\n", "mine:1: rank 0 has no tasks; leave its line out"),
        ("0: 1: 0F0", "mine:1: '1:' is not a task"),
        ("rank 0 | 0F0 0B0\nrank 0 | 1F0", "mine:2: rank 0 has a line already"),
        ("rank one | 0F0", "mine:1: 'one' is not a rank"),
        ("rank 0 | . .", "mine:1: rank 0 has no tasks; leave its line out"),
        ("rank 0 0F0", "mine:1: 'rank' is not a task"),
        ("0f0", "mine:1: '0f0' is not a task"),
        ("-1F0", "mine:1: '-1F0' is not a task"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        schedules.table(text, "mine")


def test_a_table_is_checked_as_any_schedule() -> None:
    with pytest.raises(ValueError, match="schedule 'table': rank 1 runs 1B0 before 1F0"):
        schedules.table("0F0 0B0\n1B0 1F0")(Pipeline((0, 1), 1))
    with pytest.raises(ValueError, match="rank 0 never runs 0F1"):
        schedules.table("0F0 0B0\n1F0 1B0")(Pipeline((0, 1), 2))
    with pytest.raises(ValueError, match=r"runs 0F1, but the pipeline has .* microbatches 0\.\.0"):
        schedules.table(TABLE)(Pipeline((0, 1), 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n2F0 2B0", "table: no rank runs stage 1, but there is 2"),
        ("0F0 0B0 0F2 0B2", "table: no rank runs microbatch 1, but there is 2"),
        ("9999999999F0 0B0", "table: no rank runs stage 1, but there is 9999999999"),
        ("0F9999999999", "table: no rank runs microbatch 0, but there is 9999999999"),
    ],
)
def test_a_table_with_a_gap_names_it(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.table_pipeline(text)


def test_commas_part_tasks_too() -> None:
    assert schedules.table("0F0,0B0\n1F0, 1B0,\n")(Pipeline((0, 1), 1)) == schedules.table(
        "0F0 0B0\n1F0 1B0"
    )(Pipeline((0, 1), 1))


def test_a_row_is_the_list_of_its_tasks() -> None:
    row = schedules.one_f_one_b()(Pipeline((0, 1), 3))[0]
    assert isinstance(row, TaskRow)
    listed = [Task.parse(word) for word in ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]]
    assert list(row) == listed
    assert row == listed
    assert row != listed[:-1]
    assert row[2] == listed[2]
    assert list(row[1:3]) == listed[1:3]
    assert repr(row[:2]) == "Row(0F0 0F1)"
    assert list(numbers(listed, 2, 3)) == list(row.numbers)


def test_a_row_of_another_pipeline_is_numbered_anew() -> None:
    row = schedules.one_f_one_b()(Pipeline((0,), 2))[0]
    assert list(numbers(row, 2, 3)) == [0, 6, 1, 7]
