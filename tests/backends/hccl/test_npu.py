"""NPUs where there are none."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from cg.backends.devices import find, npu
from cg.backends.errors import BindError, TransportError
from cg.backends.hccl.collectives import REDUCES
from cg.backends.hccl.communicator import connect
from cg.ir.ops.module import Channel

needs_no_torch_npu = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)


@needs_no_torch_npu
def test_without_torch_npu() -> None:
    with pytest.raises(TransportError, match="torch_npu, which cannot be imported: No module"):
        find.make("npu", 0)


def test_npus_are_a_kind_of_accelerator() -> None:
    assert "npu" in find.kinds()


def test_the_fabric_promises_what_the_ports_do() -> None:
    assert npu.HCCL.reduces == REDUCES


class BareWorld:
    """Two ranks without devices; only what is asked of it here."""

    rank, size, device = 0, 2, None

    def allgather(self, value: Any) -> list[Any]:
        return [value, value]


def test_ranks_without_npus() -> None:
    world: Any = BareWorld()
    with pytest.raises(BindError) as raised:
        connect(world, [Channel(0, (0, 1))], "/no/libhccl.so")
    assert str(raised.value) == (
        "HCCL is to serve ranks 0 and 1, but rank 0 has no NPU; leave the choice "
        "to cg, or use cg.via(x, 'cpu')"
    )
