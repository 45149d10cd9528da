"""The load generator and the ablations: their formulas, their refusals, and a run of each."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ...mpi.jobs import ROOT
from .servers import PROGRAM, Server, serving

sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))

import ablate
import nano
import ratios
from clients import ClientError
from load import Arrival, Row, make_trace, run, split, summarize

from examples.serve.features import DEFAULTS


def test_a_trace_is_that_of_its_seed() -> None:
    trace = make_trace(200, 0, rate=4.0)
    assert trace == make_trace(200, 0, rate=4.0)
    assert trace != make_trace(200, 1, rate=4.0)
    assert trace[0].at == 0.0
    assert np.diff([each.at for each in trace]).mean() == pytest.approx(0.25, rel=0.2)
    assert all(len(each.prompt) + each.output <= 2048 and each.output > 0 for each in trace)
    assert all(set(each.prompt) <= set(range(256)) for each in trace)
    slower = make_trace(200, 0, rate=4.0, scale=1.6)
    assert slower[-1].at == pytest.approx(1.6 * trace[-1].at)
    assert [each.prompt for each in slower] == [each.prompt for each in trace]
    assert {each.at for each in make_trace(5, 0)} == {0.0}
    gaps = np.diff([each.at for each in make_trace(2000, 0, rate=4.0, burstiness=0.25)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.15)


def test_lengths() -> None:
    fixed = make_trace(5, 0, lengths="fixed", means=(7, 3))
    assert {(len(each.prompt), each.output) for each in fixed} == {(7, 3)}
    uniform = make_trace(500, 0, lengths="random", means=(100, 10))
    assert {len(each.prompt) for each in uniform} <= set(range(50, 151))
    shared = make_trace(5, 0, lengths="fixed", means=(7, 3), prefix=10)
    assert {each.prompt[:10] for each in shared} == {tuple(range(10))}
    assert len({each.prompt for each in shared}) == 5


def test_the_load_of_nano_vllm() -> None:
    drawn = nano.REAL.draw()
    assert drawn == nano.REAL.draw()
    assert (len(drawn), sum(output for _, output in drawn)) == (256, 133_966)
    assert {len(prompt) for prompt, _ in drawn} <= set(range(100, 1025))
    assert {id_ for prompt, _ in drawn for id_ in prompt} <= set(range(10_001))
    for load in (nano.REAL, nano.SMALL):
        longest = max(len(prompt) + output for prompt, output in load.draw())
        assert longest <= load.context <= load.block_size * (load.blocks - 1) // load.requests
        assert len(load.warm_up()) == 4


def test_figures_are_those_of_vllm() -> None:
    rows = [
        Row(began=0.0, first=0.1, ended=0.5, gaps=[0.1, 0.1, 0.2], input=3, output=5),
        Row(began=0.5, first=0.7, ended=1.0, gaps=[0.3], input=3, output=2),
        Row(began=0.6, ended=0.9, error="500"),
        Row(began=0.6, first=0.7, ended=0.9, is_cancelled=True),
    ]
    trace = [Arrival(0.0, (1,), 5), Arrival(0.5, (1,), 2)]
    found = summarize(rows, trace, {"ttft": 150.0})
    assert (found["failed"], found["cancelled"], found["output_tokens"]) == (1, 1, 7)
    assert found["output_tokens_per_second"] == pytest.approx(7.0)
    assert found["total_tokens_per_second"] == pytest.approx(13.0)
    assert found["goodput"] == pytest.approx(1.0)
    assert found["ms"]["ttft"]["p50"] == pytest.approx(150.0)
    assert found["ms"]["tpot"]["p50"] == pytest.approx((100.0 + 300.0) / 2)
    assert found["ms"]["itl"]["p50"] == pytest.approx(150.0)


def test_load_on_a_server(clean: Server) -> None:
    trace = make_trace(20, 0, rate=200.0, means=(9, 8), longest=64)
    rows = run(clean.url(""), trace, concurrency=8)
    assert [row.error for row in rows] == [""] * 20
    assert [row.output for row in rows] == [each.output for each in trace]
    assert all(row.first is not None and row.began <= row.first <= row.ended for row in rows)
    rows = run(clean.url(""), trace, streams=False)
    assert [row.output for row in rows] == [each.output for each in trace]


def test_several_processes_share_a_load(clean: Server) -> None:
    trace = make_trace(20, 0, rate=200.0, means=(9, 8), longest=64)
    rows = run(clean.url(""), trace, processes=3, concurrency=8, salt="apart")
    assert [row.error for row in rows] == [""] * 20
    assert [(row.input, row.output) for row in rows] == [
        (len(each.prompt), each.output) for each in trace
    ]
    assert all(row.first is not None and row.began <= row.first <= row.ended for row in rows)
    found = summarize(rows, trace)
    assert found["requests"] == 20
    assert found["arrivals_late"] < found["seconds"]
    assert len(run(clean.url(""), trace[:2], processes=3)) == 2


def test_requests_at_a_time_are_shared() -> None:
    assert split(8, 3) == [3, 3, 2]
    assert split(0, 3) == [0, 0, 0]
    with pytest.raises(ValueError, match="2 requests at a time are too few for 3 processes"):
        split(2, 3)


HANGS = "input(); print('ready', flush=True); input(); import time; time.sleep(1000)"


@pytest.mark.parametrize(
    ("program", "deadline", "message"),
    [
        ("import sys; sys.exit(3)", 60.0, r"client \d is not ready: it has ended with code 3"),
        ("input(); print('no')", 60.0, r"client \d is not ready"),
        (HANGS.replace("import time", "1 / 0"), 60.0, "found nothing: it has ended with code 1"),
        (HANGS, 2.0, "not (ready|through) after 2 s: client 0, 1"),
        ("import time; time.sleep(1000)", 1.0, "not ready after 1 s: client 0, 1"),
    ],
)
def test_a_client_that_fails_fails_the_run(program: str, deadline: float, message: str) -> None:
    command = [sys.executable, "-c", program]
    with pytest.raises(ClientError, match=message):
        run("", [Arrival(0.0, (1,), 1)] * 4, processes=2, command=command, deadline=deadline)


def test_clients_that_leave_are_counted_apart(tmp_path: Path) -> None:
    trace = make_trace(20, 0, lengths="fixed", means=(9, 200), longest=300)
    with serving(tmp_path, delay=0.002) as own:
        rows = run(own.url(""), trace, cancels=0.5)
        assert 0 < sum(row.is_cancelled for row in rows) < 20
        assert not any(row.error for row in rows)
        own.wait_for(own.is_empty)


def made(speed: float, tokens: int = 10, failed: int = 0) -> ratios.Run:
    summary = {"output_tokens_per_second": speed, "output_tokens": tokens, "failed": failed}
    return {"offline": {"summary": {**summary, "ms": {}}, "cpu_ms_per_token": 1.0}}


def comparison(arm: str, bases: list[float], arms: list[float]) -> ratios.Comparison:
    moved = {arm[1:]: 1.0}
    return ratios.Comparison(arm, [*map(made, bases)], [*map(made, arms)], moved, (2.0, 3.0))


def test_ratios_are_paired_and_have_an_interval() -> None:
    """Each run of the arm is held against the two of the base around it, so a trend cancels."""
    bases = [100.0, 101.0, 99.5, 100.0, 102.0, 101.0]
    means = [(a + b) / 2 for a, b in pairwise(bases)]
    slow = comparison("-prefix", bases, [0.8 * each for each in means])
    same = comparison("-chunk", bases, [m * (1 + 0.05 * (-1) ** i) for i, m in enumerate(means)])
    assert ratios.problems(slow) == ratios.problems(same) == []
    judged = {each.arm: ratios.judge(each) for each in (slow, same)}
    name = "offline: output_tokens_per_second"
    assert judged["-prefix"]["ratios"][name]["ratio"] == pytest.approx(0.8)
    assert judged["-prefix"]["ratios"][name]["effect"]
    assert judged["-prefix"]["ready"] == pytest.approx(1.5)
    assert not judged["-chunk"]["ratios"][name]["effect"]
    text = ratios.table(judged)
    assert "-20.0%" in text
    assert "no effect" in text
    assert sorted(ratios.arms_in_order(["-a", "-b", "-c"], 0)) == ["-a", "-b", "-c"]


def test_arms_that_take_turns_have_two_runs_of_the_base_each() -> None:
    """The base's runs around one arm say nothing of the other, whose turn comes in between."""
    bases = [100.0, 101.0, 200.0, 202.0, 50.0, 50.0]
    found = comparison("-prefix", bases, [90.45, 180.9, 45.0])
    assert found.around == [(0, 1), (2, 3), (4, 5)]
    row = ratios.ratios(found)["offline: output_tokens_per_second"]
    assert row["pairs"] == pytest.approx([0.9, 0.9, 0.9])
    assert comparison("-prefix", bases[:3], [1.0, 1.0]).around == [(0, 1), (1, 2)]
    assert comparison("-prefix", bases[:2], [1.0]).around == [(0, 1)]


def test_each_switch_is_measured_by_one_plan() -> None:
    arms = [*ablate.FRONT.arms, *ablate.ENGINE.arms]
    assert sorted(arms) == sorted(f"{'-' if on else '+'}{name}" for name, on in DEFAULTS.items())
    assert ablate.FRONT.share + ablate.ENGINE.share == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bases": [made(100.0), made(104.0)]}, "the base drifts by 4.0%"),
        ({"arms": [made(100.0, tokens=11)]}, "different numbers of tokens"),
        ({"arms": [made(100.0, failed=2)]}, "2 requests failed"),
        ({"arms": [made(0.0, failed=9)]}, "9 requests failed"),
        ({"counters": {}}, "-prefix switched nothing"),
    ],
)
def test_arms_that_are_refused(change: dict[str, Any], message: str) -> None:
    found = replace(comparison("-prefix", [100.0, 100.0], [100.0]), **change)
    (why,) = ratios.problems(found)
    assert message in why
    text = ratios.table({"-prefix": ratios.judge(found)})
    assert f"refused: {why}" in text
    assert "cpu" not in text


def test_an_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fake engine; whether it is refused depends on how quiet the machine is."""
    server = f"{sys.executable} {PROGRAM} {json.dumps({'delay': 0.001}).replace(' ', '')}"
    line = ["ablate.py", "--out", str(tmp_path), "--arms", "-fast_sse", "--rounds", "2"]
    line += ["--most", "2"]
    line += ["--requests", "8", "--scales", "0.4", "inf", "--rate", "500", "--server", server]
    monkeypatch.setattr(sys, "argv", line)
    assert ablate.main() in (0, 1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    every = [*manifest["comparisons"]["front"][0]["bases"]]
    assert not any(trace["summary"]["failed"] for run_ in every for trace in run_.values())
    (found,) = manifest["comparisons"]["front"]
    assert (found["arm"], len(found["bases"]), len(found["arms"])) == ("-fast_sse", 3, 2)
    assert list(found["bases"][0]) == ["online x0.4", "online inf"]
    judged = json.loads((tmp_path / "ratios.json").read_text())["front"]["-fast_sse"]
    assert all("the base drifts" in each for each in judged["problems"])
    assert judged["ratios"]["online inf: cpu_ms_per_token"]["ratio"] > 0
    pictures = ablate.draw({"-fast_sse": judged["ratios"]}, tmp_path)
    assert len(pictures) == 2 * 8
    assert all(picture.stat().st_size > 1000 for picture in pictures)


@pytest.mark.parametrize(
    ("most", "rounds"), [(1, 2), (9, 5), (3, 3)], ids=["no more", "until it is steady", "bounded"]
)
def test_more_rounds_while_the_base_drifts(
    most: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is slow in its first run, which counts for less the more there are."""
    warming, first = [made(1.0), made(1.0)], [made(90.0)]
    turns = iter([*warming, *first, *[made(50.0), made(100.0)] * 9])
    servers = [Mock(url=name, ready=1.0) for name in ("base", "arm")]
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--out", str(tmp_path), "--rounds", "2"])
    given = ablate.parse()
    given.most = most
    monkeypatch.setattr(ablate, "together", lambda *_: nullcontext(servers))
    monkeypatch.setattr(ablate, "measure", lambda *_, **__: next(turns))
    monkeypatch.setattr(ablate, "counters", lambda url: {"prefix": 1.0})
    monkeypatch.setattr(ablate.time, "sleep", lambda seconds: None)
    (found,) = ablate.compare(given, ablate.ENGINE, ["-prefix"], math.inf)
    assert (len(found.arms), len(found.bases)) == (rounds, rounds + 1)
    assert bool(ratios.problems(found)) == (most < 9)


@pytest.mark.slow
def test_an_ablation_of_arms_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nano-vllm's load, small: one server of the base for both, in groups of two."""
    server = f"{sys.executable} {PROGRAM} {json.dumps({'delay': 0.001}).replace(' ', '')}"
    line = ["ablate.py", "--out", str(tmp_path), "--arms", "-fast_sse", "-fast_cnt", "-gc_freeze"]
    line += ["--load", "nano", "--small", "--processes", "2", "--together", "2", "--rounds", "2"]
    line += ["--most", "2"]
    monkeypatch.setattr(sys, "argv", [*line, "--server", server])
    assert ablate.main() in (0, 1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["failed"] == {}
    found = {each["arm"]: each for each in manifest["comparisons"]["nano"]}
    assert set(found) == {"-fast_sse", "-fast_cnt", "-gc_freeze"}
    counts = sorted((len(each["bases"]), len(each["arms"])) for each in found.values())
    assert counts == [(3, 2), (4, 2), (4, 2)]
    drawn = [output for _, output in nano.SMALL.draw()]
    for each in found.values():
        for made_ in (*each["bases"], *each["arms"]):
            (run_,) = made_.values()
            assert [row["output"] for row in run_["rows"]] == drawn
            assert run_["summary"]["ms"]["itl"]["p50"] > 0
    assert len(list(tmp_path.glob("server-*.log"))) == 5
    judged = json.loads((tmp_path / "ratios.json").read_text())["nano"]
    assert judged["-fast_cnt"]["rounds"] == 2


def test_an_arm_whose_server_ends_is_told_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"{sys.executable} -c raise(SystemExit('no'))"
    line = ["ablate.py", "--out", str(tmp_path), "--arms", "-fast_sse", "-gc_freeze"]
    monkeypatch.setattr(sys, "argv", [*line, "--load", "nano", "--small", "--server", server])
    assert ablate.main() == 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert set(manifest["failed"]) == {"-fast_sse", "-gc_freeze"}
    assert manifest["comparisons"] == {"nano": []}
    monkeypatch.setattr(sys, "argv", [*line[:3], "--load", "nano", "--arms", "-groups"])
    with pytest.raises(SystemExit):
        ablate.main()
