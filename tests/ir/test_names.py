"""Names that are unique in a program."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Symbol
from cg.ir.ops import Call, Value
from cg.ir.ops.module import Program
from cg.ir.ops.names import Names
from cg.ir.types import DType, Place, TensorType

T = TensorType(DType.F32, (2,), Place.of(0))


def test_names_count_from_the_base() -> None:
    names = Names(["x", "h.1"])
    assert [names.fresh("x") for _ in range(3)] == ["x.1", "x.2", "x.3"]
    assert [names.fresh("h") for _ in range(2)] == ["h", "h.2"]


def test_a_number_at_the_end_is_counted_up_and_not_extended() -> None:
    names = Names()
    assert [names.fresh("h.1") for _ in range(3)] == ["h.1", "h.2", "h.3"]
    assert [names.fresh(".1") for _ in range(2)] == [".1", ".1.1"]


@given(st.lists(st.sampled_from(["a", "a.1", "a.1.1", "a.2", "b", ".1", "a."]), max_size=30))
def test_names_are_never_given_twice(bases: list[str]) -> None:
    names = Names(["a.3"])
    given_ = [names.fresh(base) for base in bases]
    assert len({*given_, "a.3"}) == len(bases) + 1


def test_many_names_take_linear_work() -> None:
    names = Names()
    for _ in range(100_000):
        last = names.fresh("x")
    assert last == "x.99999"


def test_names_of_a_program_are_those_of_parameters_and_results() -> None:
    program = Program("p", [Value("x", T)], [Call((), (Value("y", T),), fn=Symbol("f"))])
    names = Names.of(program)
    assert (names.fresh("x"), names.fresh("y"), names.fresh("z")) == ("x.1", "y.1", "z")
