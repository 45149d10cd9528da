"""Python objects as bytes: pickle protocol 5, with the bulk data left where it is.

A message is: the length of the pickle and the number of buffers (8 bytes each), the buffers'
lengths (8 bytes each), the pickle, and the buffers, each at a multiple of 64 bytes. Tensors travel
as buffers; torch's own pickling would copy them through the pickle several times. Tensors that
share storage no longer share it on the other side, unless they are the same object.

Plain numpy arrays are common objects. numpy's pickle of one names functions and builds the dtype
from parts, by code that no cache holds any more after a large copy. So the message of such an array
has a mark in its number of buffers, and its pickle is only the dtype's name, the shape, and whether
the array can be written.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import TransportError
from .layout import round_up

Copy = Callable[[memoryview, memoryview], None]

_HEAD = struct.Struct("<QQ")
_ARRAY = 1 << 63
"""Bit of the number of buffers: the message is an array."""
_NUMPYS_OWN = 1
"""`dtype.isbuiltin` of numpy's own dtypes, in this machine's order of bytes and without fields."""
_NUMBERS = frozenset("biufc")
"""Kinds of numpy's own dtypes whose name says everything about them."""
_SHARED = 1 << 16
"""The least bytes of a buffer that shares the memory of its message, where it may. Smaller buffers
are copied in a few microseconds, and then do not keep the whole message alive."""
_REFUSALS = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""Exceptions of pickle for an object that it cannot take."""

_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})
_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


class Encoded:
    """A pickled object, ready to be written somewhere once."""

    __slots__ = ("_buffers", "_head", "_pickle", "nbytes")

    def __init__(self, stream: bytes, buffers: list[memoryview], mark: int = 0) -> None:
        lengths = [buffer.nbytes for buffer in buffers]
        self._head = _HEAD.pack(len(stream), len(buffers) | mark)
        if buffers:
            self._head += struct.pack(f"<{len(buffers)}Q", *lengths)
        self._pickle = stream
        self._buffers = buffers
        self.nbytes = len(self._head) + len(stream)
        for length in lengths:
            self.nbytes = round_up(self.nbytes) + length

    def keep(self) -> None:
        """Copy the bulk data, which is the object's own until then."""
        self._buffers = [memoryview(bytes(buffer)) for buffer in self._buffers]

    def write(self, target: memoryview, at: int, copy: Copy) -> None:
        """Write the message at byte `at` of `target`, which is a multiple of 64.

        Args:
            copy: copies bulk data, as `Copier` does.
        """
        head = at + len(self._head)
        end = head + len(self._pickle)
        target[at:head] = self._head
        target[head:end] = self._pickle
        for buffer in self._buffers:
            begin = at + round_up(end - at)
            end = begin + buffer.nbytes
            copy(target[begin:end], buffer)


def encode(value: Any) -> Encoded:
    """Pickle `value`.

    Raises:
        TransportError: it cannot be pickled.
        Exception: whatever its class raises when it is pickled; a note says so.
    """
    try:
        if type(value) in _PLAIN:
            return Encoded(pickle.dumps(value, 5), [])
        if _is_plain_array(value):
            about = (value.dtype.str, value.shape, value.flags.writeable)
            return Encoded(pickle.dumps(about, 5), [pickle.PickleBuffer(value).raw()], _ARRAY)
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(stream, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(value)
        # A copy of its bytes, not a view: a stream that is collected with a view open complains.
        return Encoded(stream.getvalue(), [buffer.raw() for buffer in buffers])
    except _REFUSALS as error:
        raise TransportError(
            f"an object of type {type(value).__qualname__} cannot be pickled, so it cannot go to "
            f"another rank, nor be copied for a caller: {error}. Send tensors and plain data, and "
            "make what cannot be pickled (files, locks, lambdas) on the rank that uses it"
        ) from error
    except Exception as error:  # from a class's own __reduce__, or from a signal's handler
        error.add_note("An object was being pickled, to be sent or copied")
        raise


def decode(source: memoryview, at: int, nbytes: int, private: bool) -> Any:
    """Make the object of the message of `nbytes` at byte `at` of `source`.

    Args:
        private: whether the object may keep the memory of `source`.

    Raises:
        Exception: whatever its class raises when it is unpickled; a note says so.
    """
    length, count = _HEAD.unpack_from(source, at)
    try:
        if not count:
            begin = at + _HEAD.size
            return pickle.loads(source[begin : begin + length])
        message = source[at : at + nbytes]
        if count & _ARRAY:
            stream, (content,) = _split(message, length, 1, private)
            name, shape, writeable = pickle.loads(stream)
            array: Any = np.ndarray(shape, name, content)
            if not writeable:
                array.flags.writeable = False
            return array
        stream, buffers = _split(message, length, count, private)
        return pickle.loads(stream, buffers=buffers)
    except Exception as error:
        error.add_note(
            "An object from another rank was being unpickled. Its class must be importable under "
            "the same name on every rank"
        )
        raise


def _is_plain_array(value: Any) -> bool:
    """Return whether an object is described by a dtype's name, a shape and its bytes."""
    return (
        type(value) is np.ndarray
        and value.flags.c_contiguous
        and value.dtype.kind in _NUMBERS
        and value.dtype.isbuiltin == _NUMPYS_OWN
    )


def _split(
    message: memoryview, length: int, count: int, private: bool
) -> tuple[memoryview, list[memoryview]]:
    """Split a message into its pickle and its buffers; small buffers are copied.

    Args:
        length: bytes of the pickle.
        count: number of the buffers.
        private: whether the larger buffers may share the memory of `message`.
    """
    lengths = struct.unpack_from(f"<{count}Q", message, _HEAD.size)
    begin = _HEAD.size + 8 * count
    end = begin + length
    stream = message[begin:end]
    buffers = []
    for size in lengths:
        start = round_up(end)
        end = start + size
        part = message[start:end]
        buffers.append(part if private and size >= _SHARED else memoryview(bytearray(part)))
    return stream, buffers


def _reduce_tensor(tensor: Tensor) -> Any:
    """A tensor as (its bytes, dtype, shape); torch's own way where that would lose something."""
    is_plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.__dict__:
        torchs_own: Callable[[int], Any] = tensor.__reduce_ex__
        return torchs_own(5)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array = plain.numpy() if plain.dtype in _NUMPY else plain.view(-1).view(torch.uint8).numpy()
    name = str(plain.dtype).removeprefix("torch.")
    state = (pickle.PickleBuffer(array.data), name, tuple(plain.shape), tensor.requires_grad)
    return (_make_parameter if type(tensor) is Parameter else _make_tensor), state


def _make_tensor(
    content: memoryview, dtype_name: str, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    dtype = getattr(torch, dtype_name)
    if content.nbytes:
        tensor = torch.frombuffer(content, dtype=dtype)
        if len(shape) != 1:
            tensor = tensor.view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def _make_parameter(
    content: memoryview, dtype_name: str, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    return Parameter(_make_tensor(content, dtype_name, shape, False), requires_grad)


_Reducer = Callable[[Any], Any]


class _Reducers(dict[type, _Reducer]):
    """The reducers of this module, and behind them those registered with `copyreg`."""

    def __missing__(self, cls: type) -> _Reducer:
        return copyreg.dispatch_table[cls]


_REDUCERS = _Reducers({Tensor: _reduce_tensor, Parameter: _reduce_tensor})
