"""Ascend NPUs, by way of torch_npu."""

from __future__ import annotations

import importlib

from ...ir.types import DType
from ..device import Fabric
from ..errors import TransportError
from .accelerator import Accelerator

HCCL = Fabric(
    "hccl",
    frozenset(
        {
            DType.F32,
            DType.F16,
            DType.BF16,
            DType.I64,
            DType.I32,
            DType.I16,
            DType.I8,
            DType.U8,
            DType.BOOL,
        }
    ),
    rendezvous=True,
)
"""HCCL, with the types that it reduces; it moves others, such as float64, as well."""


def make(index: int) -> Accelerator:
    """The NPU `index` of this process.

    torch_npu makes `torch.npu` the counterpart of `torch.cuda`. It is imported here, since most
    machines do not have it.

    Raises:
        TransportError: torch_npu is not installed, or does not find the libraries that it needs.
    """
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise TransportError(
            f"NPUs are driven by torch_npu, which cannot be imported: {error}. Install the version "
            "for this torch, and source CANN's set_env.sh; or keep the step on the CPU by "
            "CG_DEVICE=cpu"
        ) from error
    return Accelerator("npu", index, HCCL, handle="npu_stream", graph="NPUGraph")
