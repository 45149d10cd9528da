"""cg-sim: one JSON object, from a name or a table, without torch or MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cg.launch.tools.sim import main

TABLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"


def run(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_it_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        capsys,
        "--schedule zb-h1 --stages 8 --microbatches 24 --tf 18.522 --tb 18.086 --tw 9.337 "
        "--tcomm 0.601",
    )
    assert found == {
        "makespan_ms": 1310.405,
        "bubble_ratio": pytest.approx(0.1585, abs=5e-5),
        "peak_activations": [8] * 8,
    }
    busy = 24 * (18.522 + 18.086 + 9.337)
    ratio = (found["makespan_ms"] - busy) / found["makespan_ms"]
    assert found["bubble_ratio"] == pytest.approx(ratio, abs=1e-8)


@pytest.mark.parametrize(
    ("arguments", "makespan", "peaks"),
    [
        ("--schedule gpipe", 33, [8, 8, 8, 8]),
        ("--schedule 1f1b", 33, [4, 3, 2, 1]),
        ("--schedule interleaved", 28.5, [5.5, 4.5, 3.5, 2.5]),
        ("--schedule interleaved --chunks 4", 26.25, [4.75, 4.25, 3.75, 3.25]),
        ("--schedule looped-bfs --chunks 3", 27, [8, 8, 8, 8]),
        ("--schedule zb-h1", 27, [4, 4, 4, 4]),
        ("--schedule zb-h2", 24, [7, 7, 7, 7]),
        ("--schedule zb-v", 24, [4, 4, 4, 4]),
        ("--schedule dualpipe-v", 25.5, [4.5, 4.5, 4.5, 4.5]),
        ("--schedule auto", 27, [4, 4, 4, 4]),
        ("--schedule auto --max-activations 7", 24, [7, 7, 7, 7]),
        ("--schedule auto --layout vee", 24, [4, 4, 4, 4]),
        ("", 33, [4, 3, 2, 1]),
    ],
)
def test_every_schedule(
    capsys: pytest.CaptureFixture[str], arguments: str, makespan: float, peaks: list[float]
) -> None:
    found = run(capsys, f"{arguments} --stages 4 --microbatches 8")
    assert found["makespan_ms"] == pytest.approx(makespan)
    assert found["peak_activations"] == peaks


def test_the_memory_of_w_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--schedule zb-h1 --stages 4 --microbatches 8 --mw 0.5")
    assert found["peak_activations"] == [4, 3.5, 3, 2.5]


@pytest.mark.parametrize(
    ("arguments", "makespan", "traffic"),
    [
        ("--keep step --tgather 1 --treduce 1", 33 + 2, 2 * 3 / 4),  # the first, and the last
        ("--keep task --tgather 0.5 --treduce 0.5", 33 + 1, 3 * 8 * 3 / 4),  # the others are hidden
        ("--keep task --schedule zb-h1", 27, 3 * 8 * 3 / 4),
        ("--keep task --schedule gpipe --tgather 1 --treduce 3", 1 + 19 + 8 * 3, 18),  # behind B0
    ],
)
def test_stages_that_are_stored_in_pieces(
    capsys: pytest.CaptureFixture[str], arguments: str, makespan: float, traffic: float
) -> None:
    found = run(capsys, f"--stages 4 --microbatches 8 --group-size 4 {arguments}")
    assert found["makespan_ms"] == makespan
    assert found["parameter_traffic"] == traffic


def test_stages_recompute_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--schedule auto --stages 4 --microbatches 8 --max-activations 2"
    plain, chosen = run(capsys, line), run(capsys, f"{line} --mr 0.1 --remat")
    assert chosen["makespan_ms"] < plain["makespan_ms"]
    assert chosen["remat"] == [0, 1]
    assert max(chosen["peak_activations"]) <= 2
    assert "remat" not in plain


def test_each_rank_has_its_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"activation_bytes": [2, 1], "weight_bytes": [3, 1]}')
    line = f"--schedule auto --stages 2 --microbatches 6 --costs {path} --max-bytes"
    assert run(capsys, f"{line} 5,1")["peak_bytes"] == [5, 1]
    assert max(run(capsys, f"{line} 7")["peak_bytes"]) == 7


def test_the_grid_is_a_key_and_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "zb-h1", "--stages", "2", "--microbatches", "2", "--grid"]) == 0
    captured = capsys.readouterr()
    drawn = "0 | 0F0 0F1 ....0B0 0W0 0B1 0W1 \n1 | ....1F0 1B0 1F1 1B1 1W0 1W1 \n"
    assert json.loads(captured.out)["grid"] == drawn
    assert captured.err == drawn


def test_a_table_says_what_its_pipeline_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(TABLE)
    found = run(capsys, f"--table {path} --tb 2")
    assert found["makespan_ms"] == 12
    assert found["peak_activations"] == [2, 1]
    assert run(capsys, f"--table {path} --tb 2 --stages 2 --microbatches 2") == found
    assert "--stages 3: the table" in refused(capsys, f"--table {path} --stages 3")
    assert "--chunks is not for a --table" in refused(capsys, f"--table {path} --chunks 2")


def test_costs_come_from_a_file_and_options_come_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"tf": [1, 2], "tw": 5}')
    found = run(capsys, f"--schedule gpipe --stages 2 --microbatches 1 --costs {path} --tw 0")
    assert found["makespan_ms"] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--schedule 1f1b --microbatches 2", "say how many stages there are: --stages N"),
        ("--stages 2", "say how many microbatches there are: --microbatches N"),
        ("--stages 0 --microbatches 2", "--stages 0: there must be at least 1"),
        ("--stages 2 --microbatches 2 --chunks 0", "--chunks 0: there must be at least 1"),
        ("--stages 2 --microbatches 2 --tf -1", "tf is -1.0; it must be finite"),
        ("--stages 2 --microbatches 2 --tgather 1", "--tgather is for stages that are stored in"),
        ("--stages 2 --microbatches 2 --group-size 0", "--group-size 0: a group has at least 1"),
        ("--schedule zb-v --stages 2 --microbatches 2 --chunks 3", "--chunks 3: a pipeline that"),
        ("--schedule zb-h1 --stages 2 --microbatches 2 --chunks 2", "stages of a rank side by"),
        ("--schedule 1f1b --stages 2 --microbatches 2 --max-activations 2", "is for auto"),
        ("--schedule auto --stages 2 --microbatches 2 --max-activations 0", "at least 1"),
        ("--schedule auto --stages 2 --microbatches 2 --remat", "remat needs costs with mr"),
        ("--schedule zb-h1 --stages 2 --microbatches 2 --remat --mr 0", "--remat is for auto"),
        ("--stages 2 --microbatches 2 --mr 2", "mr is 2.0; it is a share of 1"),
        ("--table /no/such/file", "No such file"),
        ("--stages 2 --microbatches 2 --mw 2", "mw is 2.0; it is a share of 1"),
        ("--stages 2 --microbatches 2 --tcomm nan", "tcomm is nan; it must be finite"),
        ("--schedule auto --stages 2 --microbatches 2 --max-activations nan", "at least 1"),
        ("--stages 2 --microbatches 2 --costs /no/such/file", "No such file"),
    ],
)
def test_errors_say_what_to_do(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    error = refused(capsys, line)
    assert error.startswith("cg-sim: error: ")
    assert message in error


@pytest.mark.parametrize("line", ["--schedule nope", "--stages two", "--stages 2.5", "--what"])
def test_what_is_no_option_is_a_wrong_usage(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*line.split(), "--microbatches", "2"])
    assert "cg-sim: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"tf", "costs.json: not JSON: Expecting value"),
        (b"\xff\xfe1", "costs.json is not a text file"),
        (b"[1]", "costs.json: costs are an object, not list"),
        (b'{"tg": 1}', "costs.json: there is no cost 'tg'; choose from tf, tb, tw"),
        (b'{"tf": "long"}', "costs.json: costs: tf is 'long'; it must be a number"),
        (b'{"tf": [1, -2]}', "costs.json: costs: tf is -2; it must be finite and not negative"),
        (b'{"tf": [1, 2, 3]}', "tf is given for 3 stages, but the pipeline has 2"),
        (b'{"tcomm": []}', "tcomm is given for 0 stages, but the pipeline has 2"),
        (b'{"link": {"bandwidth": "high"}}', "bandwidth is 'high'; it must be a number"),
        (b'{"link": {"speed": 1}}', "link is an object of latency (ms) and bandwidth (GB/s)"),
        (b'{"channels": {"a": {}}}', "channels['a']: 'a' is not the number of a channel"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    assert message in refused(capsys, f"--stages 2 --microbatches 2 --costs {path}")


def test_a_table_that_waits_for_itself_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    assert "rank 0 stays at 0B0, which needs 1B0" in refused(capsys, f"--table {path}")


def test_it_needs_neither_torch_nor_mpi_nor_numpy() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'numpy'): sys.modules[name] = None\n"
        "from cg.launch.tools.sim import main\n"
        "sys.exit(main('--schedule auto --stages 2 --microbatches 3'.split()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.startswith("auto: 0.0 % above the bound")
    assert json.loads(done.stdout)["peak_activations"] == [2, 2]


def test_it_draws_the_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, html, trace = (tmp_path / name for name in ("a.svg", "b.html", "c.trace"))
    line = "--schedule 1f1b --stages 2 --microbatches 3 --tcomm 0.5"
    found = run(capsys, f"{line} --svg {svg} --html {html} --perfetto {trace}")
    assert found["makespan_ms"] > 0
    assert svg.read_text().startswith("<svg ")
    assert "1f1b: 2 ranks, 3 microbatches" in html.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 3


def test_a_folder_that_cannot_be_written_to_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    refusal = refused(capsys, f"--stages 2 --microbatches 2 --svg {tmp_path / 'file' / 'a.svg'}")
    assert "file" in refusal


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "line",
    [
        "--stages 99999999999999999999 --microbatches 4",
        "--stages 4 --microbatches 99999999999999999999",
        "--stages 100000000 --microbatches 1 --schedule auto",
        "--stages 4 --microbatches 4 --chunks 99999999999 --schedule interleaved",
        "--stages 513 --microbatches 1 --schedule zb-v",
    ],
)
def test_a_pipeline_that_is_too_large_is_refused(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    message = refused(capsys, line)
    assert "microbatches are too many: at most 1,024 stages, and 262,144 for stages" in message


def test_a_table_that_is_too_large_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "table"
    file.write_text("".join(f"{stage}F0 {stage}B0\n" for stage in range(1025)))
    assert "1,025 stages and 1 microbatches are too many" in refused(capsys, f"--table {file}")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("--tcomm 1e12", "the grid would be 3.2e+13 letters wide, and 1,000,000 are the most"),
        ("--tf 1e308", "the makespan is too large for a number: choose smaller costs"),
    ],
)
def test_costs_that_no_grid_can_show(
    capsys: pytest.CaptureFixture[str], costs: str, message: str
) -> None:
    line = f"--stages 3 --microbatches 4 --grid {costs}"
    assert message in refused(capsys, line)
