"""Regions agree with sets of indices, and pieces tile whatever is cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.layout import (
    Cut,
    Intervals,
    Layout,
    Region,
    covers,
    is_region,
    logical,
    merge,
    overlap,
    shape_of,
    share,
    union,
    volume,
    whole,
    within,
)
from cg.ir.types import DType, Mesh, Place, TensorType

dims = st.sets(st.integers(0, 11)).map(lambda found: merge((i, i + 1) for i in sorted(found)))


def regions(count: int) -> st.SearchStrategy[tuple[Region, ...]]:
    """Some regions of the same number of dimensions."""
    sizes = st.integers(0, 3)
    return sizes.flatmap(lambda n: st.tuples(*[st.tuples(*[dims] * n)] * count))


def indices(intervals: Intervals) -> list[int]:
    return [i for start, stop in intervals for i in range(start, stop)]


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(indices, region)))


@given(regions(2))
def test_regions_are_sets_of_indices(pair: tuple[Region, Region]) -> None:
    one, other = pair
    assert is_region(one)
    assert volume(one) == len(elements(one)) == math.prod(shape_of(one))
    common = overlap(one, other)
    assert is_region(common)
    assert elements(common) == elements(one) & elements(other)
    both = union(pair)
    assert is_region(both)
    assert covers(both, one)
    assert [indices(dim) for dim in both] == [
        sorted({*indices(a), *indices(b)}) for a, b in zip(one, other, strict=True)
    ]


@given(regions(2))
def test_what_is_within_a_region_is_found_there_again(pair: tuple[Region, Region]) -> None:
    held, other = pair
    part = overlap(held, other)
    local = within(part, held)
    for found, wanted, all_ in zip(local, part, held, strict=True):
        assert [indices(all_)[i] for i in indices(found)] == indices(wanted)
    assert logical(local, held) == part
    assert covers(whole(shape_of(held)), local)


@given(regions(1), st.integers(1, 6), st.data())
def test_shares_tile_a_region(one: tuple[Region], count: int, data: st.DataObject) -> None:
    (region,) = one
    if not region:
        assert [share(region, i, count) for i in range(count)] == [region] * count
        return
    dim = data.draw(st.none() | st.integers(0, len(region) - 1))
    shares = [share(region, index, count, dim) for index in range(count)]
    assert sum(map(volume, shares)) == volume(region)
    assert set[tuple[int, ...]]().union(*map(elements, shares)) == elements(region)
    along = dim if dim is not None else max(range(len(region)), key=shape_of(region).__getitem__)
    lengths = [shape_of(each)[along] for each in shares]
    assert max(lengths) - min(lengths) <= 1


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    grid = tuple(zip("abc", sizes, strict=False))
    return Mesh(tuple(draw(st.permutations(range(math.prod(sizes))))), "m", grid)


@st.composite
def cuts(draw: st.DrawFn, axes: tuple[str, ...]) -> tuple[int, Cut]:
    """A size, and a cut of it along axes."""
    blocks, unit = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = blocks * unit * draw(st.integers(0, 9))
    return size, Cut(axes, blocks, unit, draw(st.booleans()), draw(st.integers(0, 3)))


@given(meshes(), st.data())
def test_pieces_tile_a_dimension(mesh: Mesh, data: st.DataObject) -> None:
    names = [axis for axis, _ in mesh.grid]
    axes = tuple(data.draw(st.permutations(names)))[: data.draw(st.integers(1, len(names)))]
    size, cut = data.draw(cuts(axes))
    pieces = {rank: cut.piece(size, mesh.position(rank)) for rank in mesh.ranks}
    assert all(is_region((piece,)) for piece in pieces.values())
    for rank in mesh.ranks:
        members = [pieces[other] for other in mesh.fibre(rank, axes)]
        assert sorted(i for piece in members for i in indices(piece)) == list(range(size))
        copies = mesh.fibre(rank, tuple(name for name in names if name not in axes))
        assert {pieces[other] for other in copies} == {pieces[rank]}
    units = [len(indices(piece)) // cut.unit for piece in pieces.values()]
    assert max(units) - min(units) <= cut.blocks * (2 if cut.zigzag else 1)


@given(meshes(), st.data())
def test_a_fibre_has_the_ranks_that_differ_along_its_axes_only(
    mesh: Mesh, data: st.DataObject
) -> None:
    names = [axis for axis, _ in mesh.grid]
    axes = tuple(data.draw(st.permutations(names)))[: data.draw(st.integers(0, len(names)))]
    fixed = [axis for axis in names if axis not in axes]
    rank = data.draw(st.sampled_from(mesh.ranks))
    here = mesh.position(rank)
    assert mesh.fibre(rank, axes) == tuple(
        other
        for other in mesh.ranks
        if all(mesh.position(other)[axis] == here[axis] for axis in fixed)
    )


def test_a_rank_elsewhere_has_no_position() -> None:
    mesh = Mesh((3, 5), "m", (("dp", 2),))
    with pytest.raises(ValueError, match=r"rank 4 is not of the place @m"):
        mesh.position(4)
    with pytest.raises(ValueError, match=r"rank 4 is not of the place @m"):
        mesh.fibre(4, ("dp",))


@given(meshes(), st.data())
def test_gathering_the_minor_axis_gives_the_pieces_of_the_coarser_cut(
    mesh: Mesh, data: st.DataObject
) -> None:
    axes = tuple(data.draw(st.permutations([axis for axis, _ in mesh.grid])))
    size, drawn = data.draw(cuts(axes))
    cut = replace(drawn, shift=0)
    coarser = replace(cut, axes=axes[:-1])
    for rank in mesh.ranks:
        members = mesh.fibre(rank, axes[-1:])
        gathered = [i for r in members for i in indices(cut.piece(size, mesh.position(r)))]
        assert sorted(gathered) == indices(coarser.piece(size, mesh.position(rank)))


@given(meshes(), st.data())
def test_local_types_are_those_of_the_pieces(mesh: Mesh, data: st.DataObject) -> None:
    size, cut = data.draw(cuts((mesh.grid[0][0],)))
    type_ = TensorType(DType.F32, (size, 3), mesh, Layout.of((cut, Cut())))
    regions_ = type_.regions()
    assert list(regions_) == list(mesh.ranks)
    for rank, region in regions_.items():
        assert region == type_.region(rank)
        assert type_.local(rank) == TensorType(DType.F32, shape_of(region))
    copies = TensorType(DType.F32, (size, 3), Place((4, 2)))
    assert copies.regions() == {4: whole((size, 3)), 2: whole((size, 3))}
    assert copies.local(2) == TensorType(DType.F32, (size, 3))
