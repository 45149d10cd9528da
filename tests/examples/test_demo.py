"""The demo model: what it needs, and that it is cut as any other. Real weights need --slow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import cg

from ..mpi.jobs import ROOT

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "examples"))

import demo_model  # noqa: E402 (an example, found by the line above)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(SystemExit, match="the demo model needs no_such_package: pip install"):
        demo_model.write(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_weights_in_two_stages(tmp_path: Path) -> None:
    if words := demo_model.missing():
        pytest.skip(words)
    folder = tmp_path / "model"
    demo_model.write(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        cuts = cg.cut_layers(model, 2)
        first, last = cuts.part(0), cuts.part(1)
        found = last(first(None, input_ids=ids), input_ids=ids, lent=first.lend()).logits
    assert [len(stage.layers) for stage in cuts] == [19, 11], "the head counts as eight layers"
    assert torch.equal(found, wanted)
    assert tokenizer.decode(found[0, -1].argmax()) == " Paris"
