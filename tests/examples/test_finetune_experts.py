"""examples/finetune.py on mixtures of experts: adapters, shapes of ranks, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..models.test_experts import FAMILIES, SIZES
from . import tiny_model
from .test_finetune import (
    SLOW,
    TINY,
    check_opens,
    finetune,
    folders,
    losses,
    plain,
    refused,
    resumable,
    train_plainly,
    transformers,
    tune,
    validation,
)

adapters = folders.adapters
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of a mixture of experts of two layers, with a tokenizer of bytes."""
    written: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in written:
            folder = written[family] = tmp_path_factory.mktemp(family)
            tiny_model.write(folder)  # for its tokenizer
            ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 256}
            sizes = SIZES | FAMILIES[family] | ids | {"vocab_size": 257}
            config = getattr(transformers, f"{family}Config")(
                **sizes | {"max_position_embeddings": 64}, initializer_range=0.3
            )
            torch.manual_seed(0)
            getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
        return written[family]

    return write


@pytest.fixture
def mixture(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("Mixtral")


# -- adapters -----------------------------------------------------------------------------------

PLACES = {"Mixtral": "--pp 2 --ep 2", "GptOss": "--pp 1 --dp 2 --ep 2 --fsdp step"}
"""Shapes of four ranks. peft gives Mixtral adapters of two sizes, and one to its router."""


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("GptOss", marks=SLOW)])
def test_adapters_of_experts(family: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """They train as peft's own do in one process, and peft opens what is saved."""
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    model, out = folder_of(family), tmp_path / "run"
    attention = "eager" if family == "GptOss" else "sdpa"
    more = f"--lora 3 --steps 3 --save-every 1 --keep 9 --attention {attention} --evaluate-every 0"
    tune(model, out, f"{more} {PLACES[family]}", ranks=4)
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    own = adapters.add_adapters(own, 3, model, seed=0)
    assert losses(out) == pytest.approx(train_plainly(own, model, 3)[0], rel=1e-5)
    again = tmp_path / "again"
    resumable(out, again, 2)
    tune(model, again, f"{more} --pp 1 --resume", ranks=1)
    assert losses(again) == pytest.approx(losses(out), rel=1e-5)
    expected = {adapters.name_in_adapter(name): p for name, p in own.named_parameters()}
    for folder in (run / "checkpoints" / "step-000003" for run in (out, again)):
        stored = load_file(folder / "adapter_model.safetensors")
        assert stored.keys() == expected.keys() - {None}
        assert sum(".experts." in name for name in stored) == 2 * 2 * 2
        for name, tensor in stored.items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-5)
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        opened = peft.PeftModel.from_pretrained(base, folder)
        ids = torch.arange(12).view(1, 12)
        torch.testing.assert_close(opened(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-4)


# -- shapes of ranks ----------------------------------------------------------------------------


def test_experts_over_ranks(mixture: Path, tmp_path: Path) -> None:
    """Losses are those of plain transformers, and other shapes of ranks go on."""
    first = tmp_path / "first"
    tune(mixture, first, "--pp 1 --dp 2 --ep 2 --steps 3 --save-every 1 --keep 9", ranks=4)
    expected, judged = plain(mixture, 3)
    assert losses(first) == pytest.approx(expected, rel=1e-5)
    for shape, ranks in (("--pp 2 --ep 2 --sample 2", 4), ("--pp 2", 2)):
        out = tmp_path / shape
        resumable(first, out, 2)
        tune(mixture, out, f"{shape} --steps 3 --resume --evaluate-every 3", ranks=ranks)
        assert losses(out) == pytest.approx(expected, rel=1e-5)
        assert validation(out) == pytest.approx(judged, rel=1e-5)
        check_opens(out / "checkpoints" / "step-000003")


def test_implementations_of_experts(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "make_steps", _tells_experts)
    words = ["--model", mixture, "--out", tmp_path / "out", *TINY.split()]
    assert refused(monkeypatch, *words) == "cg"
    assert refused(monkeypatch, *words, "--experts", "batched_mm") == "batched_mm"
    message = refused(monkeypatch, *words, "--experts", "other")
    assert message.startswith("there are no experts='other'; there are batched_mm, cg, ")
    words[1] = tmp_path / "dense"
    tiny_model.write(words[1], num_hidden_layers=2)
    message = refused(monkeypatch, *words, "--experts", "cg")
    assert message.startswith("experts='cg' is asked for, and LlamaForCausalLM has no experts of")


def _tells_experts(cuts: Any, *_: Any) -> None:
    raise SystemExit(cuts.model.config._experts_implementation)
