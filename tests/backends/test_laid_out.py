"""Transfers between layouts, from the pass that lowers them to what ranks then hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.backends.program.tensor_regions import assembling, taking
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.attributes import Effect, Symbol
from cg.ir.layout import shape_of, share, volume, whole
from cg.ir.ops import Call, Return, Transfer, Value
from cg.ir.ops.module import Function, FunctionKind, Module, Program
from cg.ir.phases import Phase
from cg.ir.types import DType, Mesh, ObjectType, Place, TensorType, UnitType
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

from ..passes.random_transfers import (
    WORLD,
    Types,
    initial,
    is_valid,
    logical,
    selected,
    transfers,
)
from ..sampling import scaled

bounded = settings(max_examples=scaled(60))
EVERYWHERE = Place(tuple(range(WORLD)))


def traced(types: Types) -> Module:
    """A step that takes a laid-out tensor, transfers it, and shows the result to each rank."""
    source, target = types
    module = Module("step", Phase.TRACED, WORLD)
    for place in (source.place, target.place):
        if isinstance(place, Mesh):
            module.meshes[place.name] = place
    inputs = (replace(target, place=None), ObjectType())
    module.functions["show"] = Function(
        "show", inputs, (UnitType(),), FunctionKind.OPAQUE, Effect.WRITE
    )
    x, y, rank = Value("x", source), Value("y", target), Value("rank", ObjectType(EVERYWHERE))
    shown = Value("shown", UnitType(target.place))
    ops = [
        Transfer((x,), (y,)),
        Call((y, rank), (shown,), fn=Symbol("show")),
        Return((), (), at=Place.of(0)),
    ]
    module.programs.append(Program("step", [x, rank], ops))
    return module


def compiled(types: Types) -> Module:
    module = traced(types)
    PassManager(default_pipeline(), verify=True).run(module)
    return module


def pieces(type_: TensorType, held: dict[int, Any]) -> dict[int, torch.Tensor]:
    """The pieces of ranks as tensors of their shapes."""
    return {
        rank: torch.from_numpy(np.array(held[rank][selected(type_.region(rank))])) for rank in held
    }


@given(transfers().filter(is_valid), st.none() | st.integers(0, 9))
@bounded
def test_a_transfer_keeps_the_tensor(types: Types, shuffle: int | None) -> None:
    source, target = types
    held = initial(source, 0, whole_numbers=True)
    given_ = pieces(source, held)
    shown: dict[int, Any] = {}

    def show(piece: torch.Tensor, rank: int) -> tuple[None]:
        assert rank not in shown
        shown[rank] = piece.clone()
        return (None,)

    module = compiled(types)
    run = VirtualExecutable(module, {"show": show}, {}, poison=True, shuffle=shuffle)
    run.run([[*([given_[r]] if r in given_ else []), r] for r in range(WORLD)])
    assert target.place is not None
    assert shown.keys() == set(target.place.ranks)
    found = {}
    for rank, piece in shown.items():
        assert tuple(piece.shape) == shape_of(target.region(rank))
        found[rank] = np.full(target.shape, np.nan, np.float32)
        found[rank][selected(target.region(rank))] = piece.numpy()
    np.testing.assert_array_equal(logical(target, found), logical(source, held))


@given(transfers().filter(is_valid))
@bounded
def test_each_rank_calls_a_function_of_its_own_shapes(types: Types) -> None:
    _, target = types
    module = compiled(types)
    assert target.place is not None
    names = {}
    for rank in target.place.ranks:
        (call,) = (op for op in module.program_of(rank).ops if isinstance(op, Call) and
                   op.fn.name.startswith("show"))  # fmt: skip
        function = module.functions[call.fn.name]
        assert function.inputs[0] == target.local(rank)
        assert function.body_name == "show"
        names[function.name] = function.inputs
    declared = {name for name in module.functions if name.startswith("show")}
    assert declared == names.keys()
    assert len(set(names.values())) == len(names)


@given(st.data())
@bounded
def test_regions_are_taken_and_put_together(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    indices = [data.draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=n)) for n in shape]
    region = tuple(_intervals(sorted(found)) for found in indices)
    tensor = torch.arange(np.prod(shape)).reshape(shape)
    part = taking(region, shape)(tensor)
    assert torch.equal(part, torch.from_numpy(tensor.numpy()[selected(region)]))
    count = data.draw(st.integers(1, 4))
    shares = [share(whole(shape), index, count) for index in range(count)]
    made = assembling(TensorType(DType.I64, shape), shares)
    parts = [taking(each, shape)(tensor) for each in shares]
    assert torch.equal(made(parts), tensor)
    assert volume(region) == part.numel()


def _intervals(indices: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)


@pytest.mark.parametrize("region", [((1, 3),), ((0, 4),)])
def test_a_region_of_one_interval_is_a_view(region: tuple[tuple[int, int], ...]) -> None:
    tensor = torch.zeros(4, 2)
    part = taking((region, ((0, 2),)), (4, 2))(tensor)
    part.fill_(1.0)
    assert tensor.sum() == part.numel()
