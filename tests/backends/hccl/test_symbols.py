"""Finding HCCL and its functions: where it is looked for, and what is said if one is missing."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from cg.backends.errors import BindError, TransportError
from cg.backends.hccl.abi import (
    CODES,
    LAYOUTS,
    PROTOTYPES,
    REDUCTIONS,
    RootInfo,
    SendRecvItem,
    check_layouts,
)
from cg.backends.hccl.collectives import NATIVE, NEEDS, REDUCES, check_supported, reduction
from cg.backends.hccl.symbols import load
from cg.ir.attributes import ReduceOp
from cg.ir.ops import AllToAll, Send
from cg.ir.types import DType

from .build import COMPILER, build, needs_compiler


def test_absent() -> None:
    with pytest.raises(TransportError) as raised:
        load(None, folders=("/nowhere/lib64",))
    text = str(raised.value)
    assert "  libhccl.so: " in text
    assert "  /nowhere/lib64/libhccl.so: " in text
    assert "source its set_env.sh, set HCCL_SO_PATH" in text
    assert "CG_DEVICE=cpu" in text


def test_a_path_that_is_given_is_the_only_one(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be loaded") as raised:
        load(str(tmp_path / "libhccl.so"))
    assert str(raised.value).count("\n  ") == 1


@needs_compiler
def test_another_library(tmp_path: Path) -> None:
    other = compiled(tmp_path, "libhccl.so", "int HcclSend(void) { return 0; }")
    with pytest.raises(TransportError) as raised:
        load(str(other))
    assert "is not HCCL, or one that cg does not know: it has no HcclGetRootInfo, " in str(
        raised.value
    )


@needs_compiler
def test_functions_of_the_second_library(tmp_path: Path) -> None:
    """Newer versions manage communicators in libhcomm."""
    first = compiled(tmp_path, "libhccl.so", "int HcclSend(void) { return 3; }")
    managing = ("HcclGetRootInfo", "HcclCommInitRootInfo", "HcclCommDestroy")
    compiled(
        tmp_path, "libhcomm.so", "\n".join(f"int {name}(void) {{ return 4; }}" for name in managing)
    )
    symbols = load(str(first))
    assert symbols.get("HcclSend")(None, 0, 0, 0, None, None) == 3
    assert symbols.get("HcclCommDestroy")(None) == 4
    assert symbols.missing() == [name for name in PROTOTYPES if name not in (*managing, "HcclSend")]


@needs_compiler
def test_a_missing_function_is_named(tmp_path: Path) -> None:
    symbols = load(str(build(tmp_path, "-DMOCK_WITHOUT_BATCH")))
    assert symbols.missing() == ["HcclBatchSendRecv"]
    with pytest.raises(TransportError, match="has no HcclBatchSendRecv, so what needs it is not"):
        symbols.get("HcclBatchSendRecv")(None, 0, None, None)
    with pytest.raises(BindError, match=r"`all_to_all` is not supported: .* no HcclBatchSendRecv"):
        check_supported(AllToAll(dim=0), symbols)
    with pytest.raises(
        BindError, match=r"`send` in a batch is not supported: .* HcclBatchSendRecv"
    ):
        check_supported(Send(peer=1, batch=0), symbols)
    check_supported(Send(peer=1), symbols)


def test_every_op_names_a_function() -> None:
    assert set(NEEDS.values()) <= PROTOTYPES.keys()


def test_layouts() -> None:
    check_layouts(LAYOUTS)
    assert LAYOUTS.keys() == {RootInfo, SendRecvItem}


def test_a_wrong_layout_is_refused() -> None:
    class Packed(ctypes.Structure):
        _pack_ = 1
        _fields_ = SendRecvItem._fields_

    size, fields = LAYOUTS[SendRecvItem]
    with pytest.raises(TransportError, match=r"Packed has 32 bytes .* would have 28 bytes"):
        check_layouts({Packed: (size, fields)})


@pytest.mark.parametrize("dtype", sorted(set(DType) - REDUCES, key=str))
def test_types_that_are_not_reduced(dtype: DType) -> None:
    with pytest.raises(BindError, match=f"HCCL does not reduce {dtype}"):
        reduction(ReduceOp.SUM, dtype)


def test_what_is_reduced_is_what_hccl_takes() -> None:
    """On A2 and A3: seven types; products of all but two of them; no average."""
    combinations = {(op, dtype) for op in ReduceOp for dtype in REDUCES}
    for op, dtype in combinations - {(ReduceOp.AVG, DType.BOOL)}:
        found = reduction(op, dtype)
        assert found.through in NATIVE
        assert found.op in REDUCTIONS
        assert found.through in CODES
        assert found.divides == (op is ReduceOp.AVG)
        if found.op is ReduceOp.PROD:
            assert found.through not in (DType.I16, DType.BF16)


def test_booleans_have_no_average() -> None:
    with pytest.raises(BindError, match="HCCL does not average bool"):
        reduction(ReduceOp.AVG, DType.BOOL)


def compiled(folder: Path, name: str, source: str) -> Path:
    """A library of a few lines of C."""
    assert COMPILER is not None
    target = folder / name
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return target
