"""Torch on the fake device: values of the host, refusals of a device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cg.backends.fake import torch_backend
from cg.backends.fake.host_memory import on_host

THERE = "fake:0"
F = torch.nn.functional


@pytest.fixture(autouse=True, scope="module")
def known_to_torch() -> None:
    """Not when tests are collected: the process may have others to run first, with NPUs."""
    torch_backend.register()


def test_tensors_say_where_they_are_and_lie_in_the_hosts_memory() -> None:
    x = torch.arange(6.0, device=THERE).view(2, 3)
    assert str(x.device) == THERE
    assert not x.is_cpu
    assert on_host(x).data_ptr() == x.data_ptr()
    assert x[1].untyped_storage().data_ptr() == x.data_ptr()
    assert x.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + x,
        lambda x: x @ x.t(),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.gelu(x).sum(0),
        lambda x: x % 2,
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x * torch.tensor(2.0),
        lambda x: x[x > 0.5],
        lambda x: torch.sort(x, 1).indices,
        lambda x: F.conv1d(x[None], torch.ones(1, 4, 2, device=x.device)),
        lambda x: torch.cat([x, x.flip(0)]),
        lambda x: torch.empty(0, device=x.device).resize_(3).fill_(2.0),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch._foreach_mul([x, x], 2.0)[1],
        lambda x: copy.deepcopy(x),
        lambda x: x.view(torch.int32),
        lambda x: x.to(torch.float64).cumsum(1),
    ],
)
def test_values_are_those_of_the_host(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
    result = compute(x.to(THERE))
    assert str(result.device) == THERE
    assert torch.equal(result.cpu(), compute(x))


def test_a_model_is_trained_as_on_the_host() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1)
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(4, 8).to(device)
        for _ in range(3):
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(map(torch.equal, train("fake"), train("cpu")))


MIXED = "Expected all tensors to be on the same device, but found at least two devices, fake:0 and"


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x: x + torch.ones(4), MIXED),
        (lambda x: x @ torch.ones(4, 4), MIXED),
        (lambda x: torch.stack([x.sum(), torch.tensor(0.0)]), MIXED),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 0, 1])), MIXED),
        (lambda x: F.embedding(torch.tensor([0]), x), MIXED),
        (lambda x: torch.equal(x, torch.ones(4, 4)), MIXED),
        (lambda x: torch.ones(4, 4).add_(x), MIXED),
        (
            lambda x: torch.multinomial(x, 1, generator=torch.Generator()),
            "Expected a 'fake' device type for generator but found 'cpu'",
        ),
        (lambda x: x.numpy(), "can't convert fake:0 device type tensor to numpy"),
    ],
)
def test_what_a_device_refuses_is_refused(
    compute: Callable[[torch.Tensor], Any], words: str
) -> None:
    with pytest.raises((RuntimeError, TypeError), match=words):
        compute(torch.ones(4, 4, device=THERE))


def test_a_generator_of_the_device_draws_there() -> None:
    generator = torch.Generator(device="fake")
    assert str(generator.device) == THERE
    assert isinstance(generator, torch.Generator)
    drawn = torch.rand(3, generator=generator.manual_seed(3), device="fake")
    assert torch.equal(drawn.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_what_is_saved_can_be_loaded_on_the_host() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.arange(3, device="fake")}, file)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == [0, 1, 2]


def test_autocast_casts_as_on_a_device() -> None:
    x = torch.ones(2, 2, device="fake")
    with torch.autocast("fake", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert F.softmax((x @ x), 1).dtype is torch.float32
        assert (x + x).dtype is torch.float32
