"""Fakes that are made many at a time are those of torch's constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cg.tracer.method.call_fakes import _plain_fake
from cg.tracer.method.stored.plain_fakes import PlainFakes


def facts(fake: torch.Tensor) -> Any:
    keys: Any = torch._C._dispatch_keys(fake)  # type: ignore[attr-defined]
    shown = (fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.device)
    flags = (type(fake), fake.requires_grad, fake.is_leaf, fake.is_inference(), fake._is_view())
    return keys, shown, flags, vars(fake)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_fake_is_that_of_the_constructor(device: str, dtype: torch.dtype) -> None:
    mode, chosen = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None), torch.device(device)
    fakes = PlainFakes(mode)
    for shape, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ())):
        plain = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        assert facts(fakes.of(plain, chosen)) == facts(FakeTensor(mode, plain, chosen))


def test_fakes_share_no_attributes() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
    fakes, host = PlainFakes(mode), torch.device("cpu")
    first, second = (fakes.of(torch.empty(2, device="meta"), host) for _ in range(2))
    second.mine = 1  # type: ignore[attr-defined]
    first._is_param = True
    third = fakes.of(torch.empty(2, device="meta"), host)
    assert vars(third).keys() == vars(FakeTensor(mode, torch.empty(2, device="meta"), host)).keys()


def test_no_fake_gives_its_memory() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
    mode._allow_unsafe_data_ptr_access = False
    fakes = PlainFakes(mode)
    for _ in range(2):
        fake = fakes.of(torch.empty(2, device="meta"), torch.device("cpu"))
        with pytest.raises(RuntimeError, match="data pointer"):
            fake.data_ptr()


@pytest.mark.parametrize("kind", ["parameter", "frozen", "tensor", "buffer", "transient"])
def test_the_fake_of_a_state_is_that_of_torch(kind: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
    makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "parameter": torch.nn.Parameter,
        "frozen": lambda x: torch.nn.Parameter(x, requires_grad=False),
        "tensor": lambda x: x,
        "buffer": torch.nn.Buffer,
        "transient": lambda x: torch.nn.Buffer(x, persistent=False),
    }
    real = makers[kind](torch.ones(2, 3))
    fake = _plain_fake(real, real.device, PlainFakes(mode))
    expected = mode.from_tensor(real, static_shapes=True)
    assert isinstance(fake, torch.nn.Buffer) == isinstance(expected, torch.nn.Buffer)
    for name in ("_is_param", "_is_buffer", "persistent"):
        assert vars(fake).get(name) == vars(expected).get(name)
    assert facts(fake)[:-1] == facts(expected)[:-1]
