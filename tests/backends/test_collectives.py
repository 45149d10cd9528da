"""Collectives in the virtual world, held against their definitions written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.backends import exchanges
from cg.backends.errors import BindError, DeadlockError, RemoteError
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.attributes import ReduceOp

from ..sampling import scaled
from .programs import module

REDUCE = {
    ReduceOp.SUM: lambda a: a.sum(0),
    ReduceOp.AVG: lambda a: a.mean(0),
    ReduceOp.PROD: lambda a: a.prod(0),
    ReduceOp.MIN: lambda a: a.min(0),
    ReduceOp.MAX: lambda a: a.max(0),
}


def program(world: int, group: list[int], op: str, operand: str, result: str) -> str:
    ranks = "{" + ",".join(map(str, group)) + "}"
    lines = [
        f"module @c phase=scheduled world={world} {{",
        f"  channel 0 {{collective = true, ranks = {ranks}}}",
    ]
    for rank in range(world):
        lines.append(f"  program @{rank}(%x: {operand}) {{")
        if rank in group:
            lines += [
                f"    %f = {op.replace('GROUP', ranks)} : future<{result}>",
                f"    %y = wait(%f) : {result}",
                "    return(%y)",
            ]
        else:
            lines.append("    return()")
        lines.append("  }")
    return "\n".join([*lines, "}"])


def tensor_type(shape: tuple[int, ...]) -> str:
    return f"f64[{','.join(map(str, shape))}]"


def play(text: str, values: list[Any], shuffle: int | None = None) -> list[Any]:
    outputs = VirtualExecutable(module(text), {}, {}, shuffle=shuffle).run([[v] for v in values])
    return [out[0] if out else None for out in outputs]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], tuple[int, ...], int, int]:
    """World, group, a rank's shape, a dimension, the seed of the values."""
    world = draw(st.integers(1, 5))
    group = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return world, group, shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 999))


def make(world: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.integers(1, 5, shape).astype("f8")) for _ in range(world)]


@settings(max_examples=scaled(40))
@given(cases(), st.sampled_from(list(ReduceOp)))
def test_all_reduce(case: Any, op: ReduceOp) -> None:
    world, group, shape, _, seed = case
    values = make(world, shape, seed)
    type_ = tensor_type(shape)
    text = f"all_reduce(%x) {{chan = 0, group = GROUP, op = {op.value}, seq = 0}}"
    results = play(program(world, group, text, type_, type_), values, seed)
    expected = REDUCE[op](np.stack([values[rank].numpy() for rank in group]))
    for rank in range(world):
        if rank in group:
            np.testing.assert_allclose(results[rank].numpy(), expected)
        else:
            assert results[rank] is None
    assert len({r.data_ptr() for r in results if r is not None}) == len(group)


@settings(max_examples=scaled(25))
@given(cases())
def test_all_gather(case: Any) -> None:
    world, group, shape, dim, seed = case
    values = make(world, shape, seed)
    full = tuple(n * len(group) if d == dim else n for d, n in enumerate(shape))
    text = f"all_gather(%x) {{chan = 0, dim = {dim}, group = GROUP, seq = 0}}"
    results = play(program(world, group, text, tensor_type(shape), tensor_type(full)), values)
    expected = np.concatenate([values[rank].numpy() for rank in group], dim)
    for rank in group:
        np.testing.assert_array_equal(results[rank].numpy(), expected)


@settings(max_examples=scaled(25))
@given(cases(), st.sampled_from(list(ReduceOp)))
def test_reduce_scatter(case: Any, op: ReduceOp) -> None:
    world, group, shape, dim, seed = case
    full = tuple(n * len(group) if d == dim else n for d, n in enumerate(shape))
    values = make(world, full, seed)
    text = f"reduce_scatter(%x) {{chan = 0, dim = {dim}, group = GROUP, op = {op.value}, seq = 0}}"
    results = play(program(world, group, text, tensor_type(full), tensor_type(shape)), values)
    total = REDUCE[op](np.stack([values[rank].numpy() for rank in group]))
    for rank, part in zip(group, np.split(total, len(group), dim), strict=True):
        np.testing.assert_allclose(results[rank].numpy(), part)


@settings(max_examples=scaled(25))
@given(cases())
def test_all_to_all(case: Any) -> None:
    world, group, shape, dim, seed = case
    full = tuple(n * len(group) if d == dim else n for d, n in enumerate(shape))
    values = make(world, full, seed)
    text = f"all_to_all(%x) {{chan = 0, dim = {dim}, group = GROUP, seq = 0}}"
    results = play(program(world, group, text, tensor_type(full), tensor_type(full)), values)
    for index, rank in enumerate(group):
        parts = [np.split(values[r].numpy(), len(group), dim)[index] for r in group]
        np.testing.assert_array_equal(results[rank].numpy(), np.concatenate(parts, dim))


def rooted(case: Any, op: str, gives: bool, operand: str, results: list[str]) -> str:
    """A module with one collective of a group, whose last rank is the root."""
    world, group, _, dim, _ = case
    root, ranks = group[-1], "{" + ",".join(map(str, group)) + "}"
    lines = [f"module @c phase=scheduled world={world} {{"]
    lines.append(f"  channel 0 {{collective = true, ranks = {ranks}}}")
    for rank in range(world):
        sends = rank in group and (gives or rank == root)
        lines.append(f"  program @{rank}({f'%x: {operand}' if sends else ''}) {{")
        if rank in group:
            attributes = f"chan = 0, dim = {dim}, group = {ranks}, root = {root}, seq = 0"
            lines.append(
                f"    %f = {op}({'%x' if sends else ''}) {{{attributes}}} : future<{results[rank]}>"
            )
            lines.append(f"    %y = wait(%f) : {results[rank]}")
        is_given = rank in group and results[rank] != "unit"
        lines += [f"    return({'%y' if is_given else ''})", "  }"]
    return "\n".join([*lines, "}"])


@settings(max_examples=scaled(25))
@given(cases())
def test_gather(case: Any) -> None:
    world, group, shape, dim, seed = case
    values = make(world, shape, seed)
    full = tuple(n * len(group) if d == dim else n for d, n in enumerate(shape))
    types = [tensor_type(full) if rank == group[-1] else "unit" for rank in range(world)]
    text = rooted(case, "gather", True, tensor_type(shape), types)
    inputs = [[values[rank]] if rank in group else [] for rank in range(world)]
    outputs = VirtualExecutable(module(text), {}, {}, shuffle=seed).run(inputs)
    expected = np.concatenate([values[rank].numpy() for rank in group], dim)
    np.testing.assert_array_equal(outputs[group[-1]][0].numpy(), expected)
    assert sum(map(len, outputs)) == 1


@settings(max_examples=scaled(25))
@given(cases())
def test_scatter(case: Any) -> None:
    world, group, shape, dim, seed = case
    full = tuple(n * len(group) if d == dim else n for d, n in enumerate(shape))
    (whole,) = make(1, full, seed)
    text = rooted(case, "scatter", False, tensor_type(full), [tensor_type(shape)] * world)
    inputs = [[whole] if rank == group[-1] else [] for rank in range(world)]
    outputs = VirtualExecutable(module(text), {}, {}, shuffle=seed).run(inputs)
    for rank, part in zip(group, np.split(whole.numpy(), len(group), dim), strict=True):
        np.testing.assert_array_equal(outputs[rank][0].numpy(), part)
        assert outputs[rank][0].data_ptr() != whole.data_ptr()


BROADCAST = """
module @b phase=scheduled world=3 {
  channel 0 {collective = true, ranks = {0..2}}
  program @0() {
    %f = broadcast() {chan = 0, group = {0..2}, root = 1, seq = 0} : future<TYPE>
    %y = wait(%f) : TYPE
    return(%y)
  }
  program @1(%x: TYPE) {
    %f = broadcast(%x) {chan = 0, group = {0..2}, root = 1, seq = 0} : future<TYPE>
    %y = wait(%f) : TYPE
    return(%y)
  }
  program @2() {
    %f = broadcast() {chan = 0, group = {0..2}, root = 1, seq = 0} : future<TYPE>
    %y = wait(%f) : TYPE
    return(%y)
  }
}
"""


def test_broadcast_of_a_tensor_gives_each_rank_its_own() -> None:
    x = torch.arange(3.0)
    executable = VirtualExecutable(module(BROADCAST.replace("TYPE", "f32[3]")), {}, {})
    results = [out[0] for out in executable.run([[], [x], []])]
    assert all(torch.equal(result, x) for result in results)
    assert len({x.data_ptr(), *(result.data_ptr() for result in results)}) == 4


def test_broadcast_of_an_object() -> None:
    executable = VirtualExecutable(module(BROADCAST.replace("TYPE", "object")), {}, {})
    x = ["a", {"b": 1}]
    results = [out[0] for out in executable.run([[], [x], []])]
    assert results == [x, x, x]
    assert results[0] is not results[2]


def barrier(first: str, second: str) -> str:
    return f"""
    module @b phase=scheduled world=2 {{
      channel 0 {{collective = true, ranks = {{0..1}}}}
      channel 1 {{ranks = {{0..1}}}}
      program @0(%x: object) {{ {first} return() }}
      program @1() {{ {second} return() }}
    }}
    """


MEET = "%b = barrier() {chan = 0, group = {0..1}, seq = 0} : future<unit> wait(%b)"
SEND = "%s = send(%x) {chan = 1, peer = 1, seq = 0} : future<unit> wait(%s)"
RECV = "%r = recv() {chan = 1, peer = 0, seq = 0} : future<object> %v = wait(%r) : object"


def test_barrier_completes_when_all_have_come() -> None:
    text = barrier(f"{SEND} {MEET}", f"{RECV} {MEET}")
    assert VirtualExecutable(module(text), {}, {}).run([["x"], []]) == [(), ()]


def test_collective_and_message_in_crossed_order_are_a_deadlock() -> None:
    text = barrier(f"{SEND} {MEET}", f"{MEET} {RECV}")
    with pytest.raises(DeadlockError) as caught:
        VirtualExecutable(module(text), {}, {}).run([["x"], []])
    assert "rank 0 has not come to barrier 0 of channel 0" in str(caught.value)
    assert "cycle: rank 0 -> rank 1 -> rank 0" in str(caught.value)


def test_collectives_that_do_not_match_are_an_error() -> None:
    other = "%b = broadcast() {chan = 0, group = {0..1}, root = 0, seq = 0} : future<unit> wait(%b)"
    executable = VirtualExecutable(module(barrier(MEET, other), check=False), {}, {})
    with pytest.raises(RemoteError, match="collectives of channel 0 do not match: rank 0 has come"):
        executable.run([["x"], []])


def test_collective_on_a_channel_of_another_group_is_an_error() -> None:
    text = barrier(MEET.replace("{0..1}", "{1,0}"), MEET)
    with pytest.raises(BindError, match="channel 0 is not of this group"):
        VirtualExecutable(module(text, check=False), {}, {})


def test_reduction_runs_in_group_order() -> None:
    tensors = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    expected = ((tensors[0] + tensors[1]) + tensors[2]) + tensors[3]
    assert torch.equal(exchanges.reduce(tensors, ReduceOp.SUM), expected)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX])
@pytest.mark.parametrize("donated", range(4))
def test_a_reduction_in_the_memory_of_an_operand_has_the_same_bits(
    donated: int, op: ReduceOp
) -> None:
    tensors = [torch.tensor([value, 3.0]) for value in (1e8, 1.0, -1e8, 1.5)]
    others = [tensor.clone() for tensor in tensors]
    expected = exchanges.reduce(tensors, op)
    made = exchanges.reduce(tensors, op, donated)
    assert torch.equal(made, expected)
    assert made.data_ptr() == tensors[donated].data_ptr()
    for index in {0, 1, 2, 3} - {donated}:
        assert torch.equal(tensors[index], others[index])


def test_average_of_integers_is_cut_towards_zero() -> None:
    tensors = [torch.tensor([-3, 3]), torch.tensor([0, 0])]
    assert exchanges.reduce(tensors, ReduceOp.AVG).tolist() == [-1, 1]


def test_parts_must_be_equal() -> None:
    with pytest.raises(ValueError, match="dimension 0 of length 3 cannot be cut into 2"):
        exchanges.split(torch.ones(3), 2, 0)
