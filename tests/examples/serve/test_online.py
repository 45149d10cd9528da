"""The benchmark of the server on one GPU, tried out on hosts: its model, its section."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))

import nano
from processes import Wanted, together

from benchmarks.one_gpu import folder
from benchmarks.one_gpu.qwen2 import SMALL
from examples.serve.front.text import load
from examples.serve.opening import open_model
from examples.serve.parts import Ways


def test_a_folder_of_random_weights(tmp_path: Path) -> None:
    """It holds what the engine draws for these shapes."""
    folder.write(tmp_path, SMALL, 64, torch.float16)
    stored, drawn = open_model(tmp_path), open_model(SMALL.config(64))
    assert (stored.layers, stored.context, stored.vocabulary, stored.eos) == (2, 64, 512, ())
    parts = [model.build(range(2), torch.float16, Ways()).state_dict() for model in (stored, drawn)]
    assert parts[0].keys() == parts[1].keys()
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no dictionary


def test_each_token_of_the_folder_has_a_text(tmp_path: Path) -> None:
    folder.write(tmp_path, SMALL, 64, torch.float16)
    text = load(str(tmp_path))
    asked = "Hello, you\nand I."
    assert text.decode(text.encode(asked)) == asked
    assert text.decode(text.encode("é")) == "??"
    decoder = text.decoder()
    pieces = [decoder.step(token) for token in range(SMALL.vocabulary)]
    assert "" not in pieces
    assert len(set(pieces)) == len(pieces)


def test_a_server_for_the_load_compiles_what_the_engine_does() -> None:
    line = nano.server(Path("model"), nano.REAL, "float16", "inductor")
    given = " ".join(line[line.index("examples.serve") + 1 :])
    assert "--batch 256 --batches 64 --chunk 1024 --chunks --prompt-tokens 16384" in given
    assert given.endswith("--blocks 8193 --block-size 64 --context 2048 --fuse inductor")
    line = nano.server(Path("model"), nano.REAL, "float16")
    assert "--batches 16 64 128 192 --chunk" in " ".join(line)
    assert line[-2:] == ["--fuse", "none"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_section_on_hosts(tmp_path: Path) -> None:
    """One rank needs no MPI: whoever imported mpi4py would end."""
    (tmp_path / "mpi4py.py").write_text("import os\nos._exit(9)\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    line = [sys.executable, str(ROOT / "benchmarks" / "one_gpu.py"), "--device", "cpu"]
    line += ["--sections", "server", "--rounds", "2", "--json", str(tmp_path / "figures.json")]
    ended = subprocess.run(
        line,
        env={**os.environ, "CG_DEVICE": "cpu", "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["what"]: row for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    drawn = sum(output for _, output in nano.SMALL.draw())
    assert rows["through the server, output tokens"]["samples"] == [drawn, drawn]
    for what in ("output tokens a second", "TTFT p50", "ITL p99"):
        assert all(each > 0 for each in rows[f"through the server, {what}"]["samples"])


def test_a_server_that_ends_before_it_is_ready(tmp_path: Path) -> None:
    """Neither it nor the one that was started with it is left."""
    asleep = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    wanted = [
        Wanted([sys.executable, "-c", asleep], "", tmp_path / "asleep"),
        Wanted([sys.executable, "-c", "raise SystemExit('no such model')"], "", tmp_path / "ended"),
    ]
    with (
        pytest.raises(RuntimeError, match=r"not ready after(.|\n)*no such model"),
        together(wanted),
    ):
        pass
    said = (tmp_path / "asleep").read_text()  # empty, if it was ended that early
    assert not said or not Path(f"/proc/{int(said)}").exists()
    with (
        pytest.raises(RuntimeError, match="not ready after 0 s"),
        together(wanted[:1], seconds=0.0),
    ):
        pass
