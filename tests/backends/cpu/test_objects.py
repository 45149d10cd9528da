"""Objects as bytes: round trips, what is copied and what is shared, and errors."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.backends.cpu.memory.objects import decode, encode
from cg.backends.cpu.memory.parallel_memcpy import Copier
from cg.backends.errors import TransportError

from ...sampling import scaled


def round_trip(value: Any, private: bool = False) -> Any:
    encoded = encode(value)
    memory = memoryview(bytearray(64 + encoded.nbytes))
    encoded.write(memory, 64, Copier().copy)
    result = decode(memory, 64, encoded.nbytes, private)
    if not private:
        memory[:] = b"\xff" * len(memory)  # the slot is used again
    return result


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@settings(max_examples=scaled(100))
@given(plain)
def test_plain_data(value: Any) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.complex128, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_tensors_of_all_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    result = round_trip({"x": value, "y": [value]})
    for got in (result["x"], result["y"][0]):
        assert got.dtype is dtype
        assert got.shape == value.shape
        assert torch.equal(got.to(torch.complex128), value.to(torch.complex128))
    assert result["x"] is result["y"][0]


def test_non_contiguous_and_conjugated_tensors() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    for view in (value.transpose(0, 2), value[:, ::2], value[1:, :, 1].expand(5, 3)):
        assert torch.equal(round_trip((view,))[0], view)
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(round_trip((conjugate,))[0], conjugate)


def test_requires_grad_and_parameters_stay_what_they_are() -> None:
    leaf = torch.ones(3, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got_leaf, got_inner, got_weight = round_trip((leaf, leaf * 2, weight))
    assert got_leaf.requires_grad
    assert got_leaf.is_leaf
    assert got_inner.requires_grad
    assert type(got_weight) is torch.nn.Parameter
    assert not got_weight.requires_grad


def test_state_dicts_and_modules() -> None:
    module = torch.nn.Linear(3, 2)
    state, copy = round_trip((OrderedDict(module.state_dict()), module))
    assert list(state) == ["weight", "bias"]
    assert torch.equal(state["weight"], module.weight)
    assert torch.equal(copy(torch.ones(3)), module(torch.ones(3)))


def test_tensors_with_attributes_and_sparse_ones_go_torchs_own_way() -> None:
    tagged = torch.ones(2)
    tagged.tag = "kept"  # type: ignore[attr-defined]
    sparse = torch.eye(3).to_sparse()
    got_tagged, got_sparse = round_trip((tagged, sparse))
    assert got_tagged.tag == "kept"
    assert torch.equal(got_sparse.to_dense(), torch.eye(3))


def test_what_arrives_is_the_receivers_own_and_can_be_written() -> None:
    tensor, array = round_trip((torch.ones(1000), np.ones(1000)))
    tensor += 1
    array += 1
    assert tensor.sum() == array.sum() == 2000


def test_private_memory_is_kept_without_a_copy() -> None:
    value = (torch.arange(20_000.0), "text")
    encoded = encode(value)
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory, 0, Copier().copy)
    tensor, _ = decode(memory, 0, encoded.nbytes, True)
    memory[encoded.nbytes - 4 :] = b"\0\0\0\0"
    assert tensor[-1] == 0


def test_a_small_part_does_not_hold_on_to_the_message() -> None:
    value = {"small": np.arange(10), "large": np.arange(1 << 20)}
    for private in (False, True):
        encoded = encode(value)
        memory = memoryview(bytearray(encoded.nbytes))
        encoded.write(memory, 0, Copier().copy)
        result = decode(memory, 0, encoded.nbytes, private)
        memory[:] = bytes(len(memory))
        assert (result["small"] == np.arange(10)).all()
        assert bool(result["large"].any()) is not private  # which shares the memory


NUMPYS = [
    *"?bBhHiIlLqQefdgFDG",
    ">i4",
    ">g",
    ">G",
    ">c8",
    "M8[ns]",
    "m8[s]",
    "S3",
    "U2",
    "O",
    "i4,f8",
]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("dtype", NUMPYS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_arrays_of_all_dtypes_and_shapes(dtype: str, shape: tuple[int, ...], private: bool) -> None:
    value = np.zeros(shape, dtype)
    if dtype[0] in "SUO":
        value[...] = "ab"
    elif dtype != "i4,f8":
        value.reshape(-1)[...] = np.arange(value.size)
    for sent in (value, np.asfortranarray(value), value.T, np.flip(value)):
        expected = pickle.loads(pickle.dumps(sent, 5))
        # Inside of something else an array goes numpy's own way.
        for got in (round_trip(sent, private), round_trip([sent], private)[0]):
            assert type(got) is type(expected)
            assert np.array_equal(got, sent)
            if isinstance(sent, np.ndarray):  # numpy turns arrays without dimensions to scalars
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert got.flags.f_contiguous == expected.flags.f_contiguous
                assert got.flags.writeable


class Tagged(np.ndarray):
    """An array that is more than one."""


def test_what_is_more_than_an_array_stays_so() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert not round_trip(frozen).flags.writeable
    assert not round_trip([frozen])[0].flags.writeable
    assert type(round_trip(np.arange(3).view(Tagged))) is Tagged
    assert type(round_trip(np.float32(3))) is np.float32
    masked = round_trip(np.ma.masked_equal([1, 2, 3], 2))
    assert masked.mask.tolist() == [False, True, False]
    told = np.arange(3, dtype=np.dtype("i4", metadata={"unit": "m"}))
    assert round_trip(told).dtype.metadata == {"unit": "m"}


@pytest.mark.parametrize("private", [False, True])
def test_a_large_array_shares_memory_of_its_own_only(private: bool) -> None:
    encoded = encode(np.arange(1 << 16, dtype=np.uint8))
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory, 0, Copier().copy)
    got = decode(memory, 0, encoded.nbytes, private)
    memory[:] = bytes(len(memory))
    assert bool(got.any()) is not private


def test_an_array_that_may_change_is_copied() -> None:
    value = np.arange(5)
    encoded = encode(value)
    encoded.keep()
    value += 1
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory, 0, Copier().copy)
    assert decode(memory, 0, encoded.nbytes, False).tolist() == [0, 1, 2, 3, 4]


def test_bulk_data_stays_out_of_the_pickle() -> None:
    value = {"x": torch.zeros(1 << 20), "y": np.zeros(1 << 20)}
    encoded = encode(value)
    bulk: list[int] = []
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory, 0, lambda target, source: bulk.append(source.nbytes))
    assert sorted(bulk) == [4 << 20, 8 << 20]
    assert encoded.nbytes < sum(bulk) + 1000


def test_a_pickle_that_is_part_of_a_cycle_is_collected_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    cycle: list[Any] = [encode(["not", "plain"])]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not complaints


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TransportError, match=r"object of type dict cannot be pickled.*lock"):
        encode({"lock": threading.Lock()})


class Shy:
    def __reduce__(self) -> Any:
        raise PermissionError("not me")


def test_what_a_class_raises_is_its_own() -> None:
    with pytest.raises(PermissionError, match="not me") as caught:
        encode([Shy()])
    assert caught.value.__notes__ == ["An object was being pickled, to be sent or copied"]


class Strange:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ModuleNotFoundError("No module named 'theirs'")


def test_what_cannot_be_unpickled_is_explained() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'theirs'") as caught:
        round_trip([Strange()])
    (note,) = caught.value.__notes__
    assert "importable under the same name on every rank" in note
