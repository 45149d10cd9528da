"""Cells: the same by Python's views and by machine code, where this is a compiled wheel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.cpu.memory.cells import PlainCells
from cg.backends.cpu.memory.fences import full_fence
from cg.backends.cpu.memory.native import native

NBYTES = 256
KINDS = [
    pytest.param(lambda memory: PlainCells(memory, None), id="plain"),
    pytest.param(
        lambda memory: native.Cells(memory),
        id="native",
        marks=pytest.mark.skipif(native is None, reason="not a compiled wheel"),
    ),
]


@pytest.mark.parametrize("make", KINDS)
def test_what_is_put_is_there(make: Any) -> None:
    @given(st.binary(max_size=100), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
    def check(content: bytes, size: int, number: int) -> None:
        memory = memoryview(bytearray(b"." * NBYTES))
        made = make(memory)
        made.put(64, content, 1, size, 2, number)
        words = memory.cast("Q")
        assert (words[1], words[2]) == (size, number)
        assert made.get(64, len(content)) == content
        assert bytes(memory[:8]) == b"." * 8
        assert bytes(memory[24:64]) == b"." * 40
        assert bytes(memory[64 + len(content) :]) == b"." * (NBYTES - 64 - len(content))

    check()


@pytest.mark.parametrize("make", KINDS)
def test_what_would_be_outside_is_not_published(make: Any) -> None:
    memory = memoryview(bytearray(NBYTES))
    words = memory.cast("Q")
    made = make(memory)
    for at, content, size_word, number_word in (
        (NBYTES - 3, b"four", 0, 1),
        (0, b"x", NBYTES // 8, 1),
        (0, b"x", 0, NBYTES // 8),
    ):
        with pytest.raises((IndexError, ValueError)):
            made.put(at, content, size_word, 1, number_word, 1)
        assert words[1] == 0


@pytest.mark.parametrize("make", KINDS)
def test_what_is_got_is_a_copy(make: Any) -> None:
    memory = memoryview(bytearray(b"before" + b"." * 10))
    got = make(memory).get(0, 6)
    memory[:6] = b"behind"
    assert got == b"before"


def test_between_content_and_number_is_a_fence_where_one_is_needed() -> None:
    memory = memoryview(bytearray(NBYTES))
    words = memory.cast("Q")
    seen = []
    made = PlainCells(memory, lambda: seen.append((bytes(memory[64:65]), words[1], words[2])))
    made.put(64, b"x", 1, 7, 2, 8)
    assert seen == [(b"x", 7, 0)]


@pytest.mark.skipif(native is None, reason="not a compiled wheel")
class TestMachineCode:
    """Accesses that Python's views would refuse in their own words."""

    def test_writes_nothing_unless_all_is_inside(self) -> None:
        memory = memoryview(bytearray(64))
        made = native.Cells(memory)
        for arguments in ((0, b"x", 8, 1, 1, 1), (0, b"x", 1, 1, 8, 1), (63, b"xx", 1, 1, 2, 2)):
            with pytest.raises(IndexError):
                made.put(*arguments)
        assert bytes(memory) == bytes(64)

    def test_refuses_memory_that_it_cannot_use(self) -> None:
        with pytest.raises(BufferError):
            native.Cells(memoryview(bytes(64)))
        with pytest.raises(TypeError):
            native.Cells(7)
        with pytest.raises(ValueError, match="begin at a word"):
            native.Cells(memoryview(bytearray(64))[1:])

    @pytest.mark.parametrize(
        "arguments",
        [(), (0, b"x", 1, 1, 2), (0, "x", 1, 1, 2, 2), (0, bytearray(1), 1, 1, 2, 2)],
    )
    def test_refuses_other_arguments(self, arguments: tuple[Any, ...]) -> None:
        made = native.Cells(memoryview(bytearray(64)))
        with pytest.raises(TypeError, match="put"):
            made.put(*arguments)
        with pytest.raises(TypeError, match="get"):
            made.get(1)

    def test_refuses_numbers_that_are_none(self) -> None:
        made = native.Cells(memoryview(bytearray(64)))
        with pytest.raises(OverflowError):
            made.put(0, b"x", 1, -1, 2, 2)
        with pytest.raises(OverflowError):
            made.put(0, b"x", 1, 2**64, 2, 2)
        with pytest.raises(TypeError):
            made.put(0, b"x", 1, "1", 2, 2)
        for at, nbytes in ((-1, 1), (0, -1), (60, 5), (2**62, 2**62)):
            with pytest.raises(IndexError):
                made.get(at, nbytes)
        with pytest.raises(IndexError, match="no word -1"):
            made.put(0, b"x", -1, 1, 2, 2)

    def test_the_memory_stays_as_long_as_its_cells(self) -> None:
        memory = bytearray(64)
        made = native.Cells(memoryview(memory))
        with pytest.raises(BufferError):
            memory.extend(b"more")
        del made
        memory.extend(b"more")

    def test_the_fence_is_the_one_that_is_used(self) -> None:
        assert full_fence() is native.fence
        assert native.fence() is None
