"""HCCL's interface as numbers and layouts: element types, reductions, results, prototypes.

Source: the public headers of HCCL, https://gitcode.com/cann/hccl (`include/hccl`), and its
reference of operations, `docs/zh/api_ref/comm_op_interface`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from ...ir.attributes import ReduceOp
from ...ir.types import DType
from ..errors import TransportError

SUCCESS = 0
NOT_SUPPORTED, UNAVAILABLE, TIMEOUT, TCP_CONNECT = 5, 7, 9, 11

RESULTS = {
    1: "parameter error",
    2: "empty pointer",
    3: "memory error",
    4: "internal error",
    5: "not supported",
    6: "not found",
    7: "unavailable resource",
    8: "system call error",
    9: "timeout",
    10: "file cannot be opened",
    11: "TCP connection failed",
    12: "RoCE connection failed",
    13: "TCP transfer failed",
    14: "RoCE transfer failed",
    15: "runtime error",
    16: "driver error",
    17: "profiling error",
    18: "CCE error",
    19: "network error",
    20: "try again",
    21: "remote error",
    22: "suspending",
    23: "retry failed",
    24: "out of memory",
}
"""`HcclResult` in words, for libraries that lack `HcclGetErrorString`."""

CODES: dict[DType, int] = {
    DType.I8: 0,
    DType.I16: 1,
    DType.I32: 2,
    DType.F16: 3,
    DType.F32: 4,
    DType.I64: 5,
    DType.U64: 6,
    DType.U8: 7,
    DType.U16: 8,
    DType.U32: 9,
    DType.F64: 10,
    DType.BF16: 11,
}
"""`HcclDataType`."""

BYTES = CODES[DType.U8]
"""The element type of messages, which are moved and not looked into."""

REDUCTIONS: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
}
"""`HcclReduceOp`, which has no average."""

SEND, RECEIVE = 0, 1
"""`HcclSendRecvType`."""


class RootInfo(ctypes.Structure):
    """`HcclRootInfo`: what the members of a new communicator have in common."""

    _fields_ = [("internal", c_char * 4108)]


class SendRecvItem(ctypes.Structure):
    """`HcclSendRecvItem`: one message of a batch."""

    _fields_ = [
        ("send_recv_type", c_int32),
        ("buffer", c_void_p),
        ("count", c_uint64),
        ("data_type", c_int32),
        ("remote_rank", c_uint32),
    ]


LAYOUTS: dict[type[ctypes.Structure], tuple[int, dict[str, int]]] = {
    RootInfo: (4108, {"internal": 0}),
    SendRecvItem: (
        32,
        {"send_recv_type": 0, "buffer": 8, "count": 16, "data_type": 24, "remote_rank": 28},
    ),
}
"""Size of each structure, and where its fields lie, as a C compiler has them."""


def check_layouts(layouts: dict[type[ctypes.Structure], tuple[int, dict[str, int]]]) -> None:
    """Compare the layouts of structures on this machine with those in C.

    Raises:
        TransportError: one has another size, or a field lies elsewhere: HCCL would read nonsense.
    """
    for structure, (size, fields) in layouts.items():
        nbytes = ctypes.sizeof(structure)
        offsets = {name: getattr(structure, name).offset for name in fields}
        if nbytes != size or offsets != fields:
            raise TransportError(
                f"HCCL's {structure.__name__} has {size} bytes and fields at {fields}, but here it "
                f"would have {nbytes} bytes and fields at {offsets}: this platform is not supported"
            )


_COMM = _STREAM = _DATA = c_void_p

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "HcclGetRootInfo": (POINTER(RootInfo),),
    "HcclCommInitRootInfo": (c_uint32, POINTER(RootInfo), c_uint32, POINTER(_COMM)),
    "HcclCommDestroy": (_COMM,),
    "HcclGetCommAsyncError": (_COMM, POINTER(c_int32)),
    "HcclGetErrorString": (c_int32,),
    "HcclSend": (_DATA, c_uint64, c_int32, c_uint32, _COMM, _STREAM),
    "HcclRecv": (_DATA, c_uint64, c_int32, c_uint32, _COMM, _STREAM),
    "HcclBatchSendRecv": (POINTER(SendRecvItem), c_uint32, _COMM, _STREAM),
    "HcclAllReduce": (_DATA, _DATA, c_uint64, c_int32, c_int32, _COMM, _STREAM),
    "HcclReduceScatter": (_DATA, _DATA, c_uint64, c_int32, c_int32, _COMM, _STREAM),
    "HcclAllGather": (_DATA, _DATA, c_uint64, c_int32, _COMM, _STREAM),
    "HcclBroadcast": (_DATA, c_uint64, c_int32, c_uint32, _COMM, _STREAM),
}
"""The functions in use, with their argument types. They return `HcclResult`, except for one."""

RETURNS: dict[str, Any] = {"HcclGetErrorString": c_char_p}
"""The results of functions that return no `HcclResult`."""

ESSENTIAL = ("HcclGetRootInfo", "HcclCommInitRootInfo", "HcclCommDestroy")
"""Without these there are no communicators; without any other, some ops are not supported."""
