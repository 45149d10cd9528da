"""The benchmark of the server on one GPU, tried out on hosts: its model, its section."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import safe_open

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from benchmarks.one_gpu import folder
from benchmarks.one_gpu.qwen2 import SMALL
from examples.serve.families import open_model
from examples.serve.front.text import load


def test_a_folder_of_random_weights(tmp_path: Path) -> None:
    """It holds what the engine draws for these shapes."""
    folder.write(tmp_path, SMALL, 64, torch.float16)
    stored, drawn = open_model(tmp_path), open_model(SMALL.config(64))
    assert (stored.layers, stored.context, stored.vocabulary, stored.eos) == (2, 64, 512, ())
    parts = [model.build(range(2), torch.float16).state_dict() for model in (stored, drawn)]
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
