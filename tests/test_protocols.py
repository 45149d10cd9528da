"""What modules are asked for by `isinstance` is found without `__getattr__`.

From Python 3.12 on, `isinstance` with a protocol looks members up by `inspect.getattr_static`. A
module finds its parameters and modules by `__getattr__`, so a protocol that has one is no module's.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from typing_extensions import get_protocol_members

from cg.launch.conversions.conversion import StoredType
from cg.launch.models import adapted
from cg.launch.quantized.quantized_linear import QuantizedLinear
from cg.launch.quantized.readers import read_settings
from examples.serve import products

NOTHING = object()


def missing(module: nn.Module, protocol: type) -> set[str]:
    """Members of a protocol that are found by `__getattr__` alone, or not at all."""
    return {
        name
        for name in get_protocol_members(protocol)
        if inspect.getattr_static(module, name, NOTHING) is NOTHING
    }


def test_a_quantized_layer() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    weight_format = read_settings(settings).choose("up", ("Linear",))
    assert weight_format is not None
    types = {
        "weight": StoredType((64, 32), torch.float8_e4m3fn),
        "weight_scale_inv": StoredType((2, 1), torch.float32),
    }
    layer = QuantizedLinear(nn.Linear(32, 64, device="meta"), weight_format, types)
    assert isinstance(layer, products._Quantized)
    assert not missing(layer, products._Quantized)


def test_adapters_of_stacked_weights() -> None:
    peft = pytest.importorskip("peft")

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.up[0]

    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.up"], r=2)
    model = peft.get_peft_model(nn.ModuleDict({"experts": Experts()}), config)
    wrappers = [m for m in model.modules() if isinstance(m, adapted._WithAdapters)]
    assert len(wrappers) == 1
    assert not missing(wrappers[0], adapted._WithAdapters)
