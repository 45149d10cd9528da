"""Gradients that a graph makes are made in the memory where they stay, and not copied there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cg.backends.devices.programs import capture
from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.fake import torch_backend
from cg.tracer.graph.autodiff.products import add_product
from cg.tracer.graph.codegen.accumulate import accumulate

from .test_fallbacks import Body, Told, X


@pytest.fixture(autouse=True, scope="module")
def known_to_torch() -> None:
    """Not when tests are collected: the process may have others to run first, with NPUs."""
    torch_backend.register()


class Training(Body):
    """Adds to a gradient, as bodies do: by the product itself, or what it has computed."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.parameters = [nn.Parameter(torch.zeros(4, 4, device="fake"))]

    def run(self, x: Any) -> Sequence[Tensor]:
        (parameter,) = self.parameters
        if self.form == "product":
            add_product(parameter, x[:, None], x[None], False, self.new_gradients)
        else:
            accumulate([parameter], [torch.outer(x, x)], (True,), self.new_gradients)
        return (x * 2,)


@pytest.mark.parametrize("form", ["product", "owned"])
def test_they_are_made_where_they_stay(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    copy_all = capture.copy_all

    def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copied.extend(targets)
        copy_all(targets, sources)

    monkeypatch.setattr(capture, "copy_all", copy)
    body = Training(form)
    (parameter,) = body.parameters
    told = Told(body)
    places = []
    for _ in range(WARM_UPS + 3):
        parameter.grad = None
        told.run()
        assert parameter.grad is not None
        assert torch.equal(
            parameter.grad.cpu(), 2 * torch.outer(X, X)
        )  # the program calls it twice
        places.append(parameter.grad.data_ptr())
    assert told.segment.replays == 3
    assert len(set(places[WARM_UPS:])) == 1
    assert [t.shape for t in copied] == [(4,)] * len(copied)  # results alone
    assert body.new_gradients == {}
    told.run()  # a gradient that is there is added to
    assert torch.equal(parameter.grad.cpu(), 4 * torch.outer(X, X))
