"""Dropout on a cut sequence, within attention and around it, is the one of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg

from ...worlds import virtual_world
from .dropout_training import FORMS, MESHES, check

_world = virtual_world(8, threads=1)


MASKS = ("causal", "window", "documents", "padding")
FEW = ("one", "cp3", "cp2-tp2", "pp2-cp2")


@pytest.mark.grid(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("mask", MASKS)
def test_training(name: str, form: str, mask: str) -> None:
    check(MESHES[name](), form, mask)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted({*MESHES} - {*FEW}))
@pytest.mark.parametrize("mask", MASKS)
def test_training_on_other_meshes(name: str, form: str, mask: str) -> None:
    check(MESHES[name](), form, mask)


@pytest.mark.grid(1)
@pytest.mark.parametrize("form", ["gather", "ring", "zigzag-ring"])
@pytest.mark.parametrize(
    "options",
    [{"is_again": True}, {"remat": True}, {"store": cg.cut(0, "dp", "cp")}],
    ids=["checkpoint", "remat", "fsdp"],
)
def test_draws_are_computed_again(form: str, options: dict[str, Any]) -> None:
    """By a checkpoint of torch and by `cg.remat`; and layers may rest in pieces."""
    check(MESHES["cp2"](), form, **options)


@cg.actor
class Written(nn.Module):
    """Attention as products and a softmax, as `"eager"` of transformers has it."""

    def forward(self, x: Tensor) -> Tensor:
        shares = functional.dropout((x @ x.mT).softmax(-1), 0.3)
        return shares @ x


def test_attention_that_is_written_out_is_refused() -> None:
    plan = {"forward(x)": cg.cut(1, "cp")}
    written = Written.on(cg.mesh(cp=2), plan=plan)()  # type: ignore[attr-defined]
    step = cg.trace(lambda x: written.forward(x))
    with pytest.raises(cg.LayoutError, match="another dimension of %") as error:
        step.lower(torch.ones(2, 6, 4))
    assert "test_attention_dropout.py" in str(error.value)
