"""Products of few rows with quantized weights, by the operator of hosts and by kernels.

Kernels of Triton run in its interpreter, where Triton is installed, and on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cg.launch.conversions.conversion import StoredType
from cg.launch.quantized import few_rows
from cg.launch.quantized.few_rows import product_of_few
from cg.launch.quantized.quantized_linear import QuantizedLinear
from cg.launch.quantized.readers import read_settings
from cg.tracer.method.quantized.quantized_kernel import (
    MOST,
    MOST_SUMMANDS,
    TYPES,
    has_float8,
    multiply,
    summands_of,
    tiles_of,
)
from cg.tracer.method.quantized.weight_format import WeightFormat

from .quantized_folders import FORMS, SIZE, Form, packed

SHAPES = ((48, 64), (160, 512), (16, 208))
"""Outputs and inputs; the last are of no whole tiles where a token has one scale."""
ROWS = (1, 3)


def layer_of(form: Form, outputs: int, inputs: int) -> tuple[WeightFormat, dict[str, Tensor], Any]:
    """The format of a layer, its tensors, and the weight that they stand for."""
    generator = torch.Generator().manual_seed(outputs)
    made = form.quantize(torch.randn(outputs, inputs, generator=generator))
    weight_format = read_settings(form.settings).choose("up", ("Linear",))
    assert weight_format is not None
    return weight_format, made.tensors, made.weight


def compare(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Multiply by each format on a device, and by the weights that it stands for on the host."""
    for name, form in FORMS.items():
        for outputs, inputs in SHAPES:
            weight_format, tensors, weight = layer_of(form, outputs, inputs)
            own = {name: tensor.to(device) for name, tensor in tensors.items()}
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                product = product_of_few(weight_format, own, x.to(device), outputs)
                if weight_format.by_index:
                    assert product is None, name
                    continue
                assert product is not None, name
                assert product.dtype is dtype, name
                right = x.double() @ weight.double().t()
                error = (product.cpu() - right).norm() / right.norm()
                assert error < tolerance, f"{name}, {rows} x {outputs} x {inputs}: {error}"
        print("equal")


def compare_float8(device: str, dtype: torch.dtype, has_nan: bool) -> None:
    """Multiply each float8 by one, also subnormal ones."""
    numbers = torch.arange(256, dtype=torch.uint8)
    if not has_nan:
        numbers[numbers & 0x7F == 0x7F] = 0
    for rows in (1, 2):
        levels = torch.zeros(256, 64, dtype=torch.uint8)
        levels[:, 5] = numbers
        weight = levels.to(device).view(torch.float8_e4m3fn).view(1, 256, 1, 64)
        x = torch.zeros(rows, 1, 64, 1, device=device, dtype=dtype)
        x[:, :, 5] = 1
        scale = torch.ones(1, 1, 1, device=device)
        product = multiply(x, weight, scale, None, 1, 0, False, False, 2).sum(0).cpu()
        right = numbers.view(torch.float8_e4m3fn).float().expand(rows, 256)
        torch.testing.assert_close(product.view(rows, 256), right, rtol=0, atol=0, equal_nan=True)
    print("each")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts, too."""
    monkeypatch.setattr(few_rows, "has_kernel", lambda *types: True)


@pytest.mark.parametrize(
    ("hip", "capability", "right"),
    [(None, (8, 9), True), (None, (8, 0), False), ("6.4", (9, 4), False)],
)
def test_devices_that_have_float8(
    hip: str | None, capability: tuple[int, int], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of AMD with compute capability 9.4 have another type of 8 bits."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_float8(torch.device("cuda")) is right


@pytest.mark.usefixtures("served")
def test_the_operator_of_hosts_is_the_product() -> None:
    compare("cpu", torch.float32, 2e-6)


def test_kernels_are_the_product() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.models.test_few_rows"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == len(FORMS)
    assert done.stdout.count("words") == 1
    assert done.stdout.count("each") == 1
    assert done.stdout.count("offset") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_on_a_gpu_are_the_product(dtype: torch.dtype) -> None:
    compare("cuda", dtype, 4 * torch.finfo(dtype).eps)
    compare_words("cuda", dtype)
    compare_float8("cuda", dtype, has_nan=True)
    compare_offsets("cuda", dtype)


@pytest.mark.usefixtures("served")
def test_more_rows_and_other_sizes_are_not_served() -> None:
    """The weight is dequantized for them, also where groups are no tiles, or ragged."""
    form = FORMS["fp8"]
    weight_format, tensors, _ = layer_of(form, 48, 64)
    for rows, is_served in ((0, False), (MOST, True), (MOST + 1, False)):
        product = product_of_few(weight_format, tensors, torch.randn(rows, 64), 48)
        assert (product is not None) is is_served
    for outputs, inputs in ((48, 60), (44, 64)):
        ragged = layer_of(form, outputs, inputs)[1]
        assert product_of_few(weight_format, ragged, torch.randn(1, inputs), outputs) is None
    small = read_settings(form.settings | {"weight_block_size": [SIZE, 8]}).choose("up", ())
    assert small is not None
    assert product_of_few(small, tensors, torch.randn(1, 64), 48) is None


def test_hosts_and_devices_without_the_kernel_dequantize() -> None:
    weight_format, tensors, weight = layer_of(FORMS["gptq"], 48, 64)
    x = torch.randn(2, 64)
    assert product_of_few(weight_format, tensors, x, 48) is None
    types = {name: StoredType(tuple(each.shape), each.dtype) for name, each in tensors.items()}
    layer = QuantizedLinear(nn.Linear(64, 48, bias=False, device="meta"), weight_format, types)
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("bits", "size"), [(2, 16), (8, 4)])
def test_words_of_other_integers(bits: int, size: int) -> None:
    """Of GPTQ, with zero points that wrap around."""
    weight_format, tensors, weight = gptq_of(bits)
    product = product_of_few(weight_format, tensors, torch.eye(64)[:MOST], 32)
    assert product is not None
    assert torch.equal(product, weight.t()[:MOST])
    assert tensors["qweight"].shape == (64 // size, 32)


def gptq_of(bits: int) -> tuple[WeightFormat, dict[str, Tensor], Tensor]:
    """A layer of 64 inputs and 32 outputs of GPTQ, whose first zero point is stored as the last."""
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(1 << bits, (32, 64), generator=generator)
    zeros = torch.randint(1 << bits, (32, 4), generator=generator)
    zeros[0] = 0
    scales = torch.rand(32, 4, generator=generator).half()
    tensors = {
        "qweight": packed(levels, bits).t().contiguous(),
        "qzeros": packed((zeros.t() - 1) % (1 << bits), bits),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(64) // SIZE).int(),
    }
    spread: Callable[[Tensor], Tensor] = partial(torch.repeat_interleave, repeats=SIZE, dim=1)
    weight = (levels - spread(zeros)).float() * spread(scales.float())
    chosen = read_settings(FORMS["gptq"].settings | {"bits": bits}).choose("up", ())
    assert chosen is not None
    return chosen, tensors, weight


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("levels", "are_words"),
    [(torch.int32, False), (torch.int32, True), (torch.float8_e4m3fn, False)],
)
def test_more_programs_share_inputs_where_there_are_few_outputs(
    rows: int, levels: torch.dtype, are_words: bool
) -> None:
    """But each has as many whole steps, and some of them."""
    for outputs, inputs, group in ((64, 4096, 128), (4096, 14336, 128), (14336, 4096, 4096)):
        units = outputs // 8 if are_words else outputs
        tiles = tiles_of(rows, levels, are_words, group, inputs, units)
        assert tiles is not None
        assert tiles.units >= tiles.least
        count = summands_of(tiles, inputs, units)
        steps = inputs // (tiles.inputs * tiles.inner)
        assert 1 < count <= MOST_SUMMANDS
        assert steps % count == 0
        assert steps // count >= tiles.steps
        more = tiles_of(rows, levels, are_words, group, inputs, 64 * units)
        assert more is not None
        assert more.units >= tiles.units
        assert summands_of(more, inputs, 64 * units) <= count
    assert summands_of(tiles, 128, 64) == 1


@pytest.mark.usefixtures("served")
def test_bytes_of_columns() -> None:
    """As tensors of other strides have them."""
    weight_format, tensors, _ = layer_of(FORMS["fp8"], 48, 64)
    x = torch.randn(1, 64)
    turned = {**tensors, weight_format.weight: tensors[weight_format.weight].t().contiguous().t()}
    product, same = (product_of_few(weight_format, own, x, 48) for own in (tensors, turned))
    assert product is not None
    torch.testing.assert_close(product, same)


def compare_words(device: str, dtype: torch.dtype) -> None:
    """Multiply integers of 2 and 8 bits by one: products are weights, rounded once."""
    for bits in (2, 8):
        weight_format, tensors, weight = gptq_of(bits)
        own = {name: tensor.to(device) for name, tensor in tensors.items()}
        product = product_of_few(
            weight_format, own, torch.eye(64, device=device).to(dtype)[:MOST], 32
        )
        assert product is not None
        assert torch.equal(product.cpu(), weight.t()[:MOST].to(dtype))
    print("words")


def compare_offsets(device: str, dtype: torch.dtype) -> None:
    """Multiply bytes from which a number is subtracted, and zero points besides, or none."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-128, 128, (32, 64), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (1, 32, 2), generator=generator, dtype=torch.int8)
    for zero, rows in ((None, 1), (None, 2), (zeros, 1), (zeros, 2)):
        x = torch.randint(-4, 4, (rows, 64), generator=generator).to(dtype)
        points = 8 + (0 if zero is None else zero[0].repeat_interleave(32, 1).double())
        right = x.double() @ (levels.double() - points).t()
        own = x.view(rows, 2, 32, 1).to(device), levels.view(1, 32, 2, 32).to(device)
        scale = torch.ones(1, 32, 2, dtype=torch.float16, device=device)
        zero = None if zero is None else zero.to(device)
        product = multiply(*own, scale, zero, 1, 8, False, False, 1).sum(0).view(rows, 32)
        assert torch.equal(product.cpu().double(), right)
    print("offset")


if __name__ == "__main__":  # in the interpreter, which is chosen when the kernels are defined

    def by_kernel(x: Tensor, *tensors: Tensor | None, **options: Any) -> Tensor:
        return multiply(x, *tensors, **options)  # type: ignore[arg-type]

    few_rows.has_kernel = lambda *types: True
    few_rows.quantized_product = by_kernel
    dtype = torch.float16  # the interpreter multiplies the bits of bfloat16
    compare("cpu", dtype, 4 * torch.finfo(dtype).eps)
    compare_words("cpu", dtype)
    compare_float8("cpu", dtype, has_nan=False)  # nor does it know that of float8
    compare_offsets("cpu", dtype)
