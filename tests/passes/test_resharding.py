"""Plans of transfers: each rank gets its part, no more than it lacks, in few messages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cg.ir.attributes import ReduceOp
from cg.ir.layout import Cut, Layout, overlap, volume
from cg.ir.types import DType, Mesh, Place, TensorType
from cg.passes.placement import resharding, resharding_messages
from cg.passes.placement.resharding import plan
from cg.passes.placement.resharding_plan import (
    NEUTRAL,
    CombineRound,
    GatherRound,
    MoveRound,
    ReduceRound,
)

from ..sampling import examples
from .random_transfers import (
    Interpreter,
    Types,
    initial,
    logical,
    messages_of,
    ranks_of,
    reduction,
    selected,
    summands,
    transfers,
)


def tensor(
    shape: tuple[int, ...],
    place: Place,
    cuts: Mapping[int, tuple[str, ...]] | None = None,
    summed: tuple[str, ...] = (),
    reduce: ReduceOp = ReduceOp.SUM,
) -> TensorType:
    """A type with some dimensions cut."""
    found = [Cut((cuts or {}).get(dim, ())) for dim in range(len(shape))]
    return TensorType(DType.F32, shape, place, Layout.of(found, summed, reduce))


def ranks(start: int, stop: int) -> Place:
    return Place(tuple(range(start, stop)))


ROWS = {0: ("*",)}
COLUMNS = {1: ("*",)}
SUM = ("*",)


# Random transfers


@examples(600, shrinks=True)
@given(types=transfers(before=False, after=False), seed=st.integers(0, 99))
def test_each_rank_gets_its_part_and_no_more_than_it_lacks(types: Types, seed: int) -> None:
    source, target = types
    held = initial(source, seed)
    whole = logical(source, held)
    found = plan(source, target)
    run = Interpreter(found, held)
    for rank in ranks_of(target):
        part = target.region(rank)
        np.testing.assert_array_equal(run.part(rank, part), whole[selected(part)])
        own = volume(overlap(part, source.region(rank))) if rank in ranks_of(source) else 0
        assert run.received[rank] == volume(part) - own
    assert sum(run.received.values()) == sum(run.received[rank] for rank in ranks_of(target))
    assert run.received == found.received()


@examples(400, shrinks=True)
@given(types=transfers(after=False), seed=st.integers(0, 99))
def test_summands_are_combined_in_the_order_of_their_group(types: Types, seed: int) -> None:
    source, target = types
    assume(summands(source))
    held = initial(source, seed)
    whole = logical(source, held)
    found = plan(source, target)
    run = Interpreter(found, held)
    for rank in ranks_of(target):
        part = target.region(rank)
        np.testing.assert_array_equal(run.part(rank, part), whole[selected(part)])
    assert run.received == found.received()


@examples(300, shrinks=True)
@given(types=transfers(), seed=st.integers(0, 99))
def test_what_becomes_a_sum_stays_the_same_tensor(types: Types, seed: int) -> None:
    source, target = types
    assume(summands(target))
    held = initial(source, seed, whole_numbers=True)
    run = Interpreter(plan(source, target), held, NEUTRAL.get(reduction(target), 0))
    for rank in ranks_of(target):
        run.part(rank, target.region(rank))
    np.testing.assert_array_equal(logical(target, run.held), logical(source, held))


@examples(200)
@given(types=transfers())
def test_a_plan_is_the_same_each_time(types: Types) -> None:
    assert plan(*types) == plan(*types)


# What it costs


@pytest.mark.parametrize(("senders", "receivers"), [(4, 2), (3, 4), (2, 4), (6, 4), (1, 5), (5, 5)])
def test_cut_to_cut_on_other_ranks(senders: int, receivers: int) -> None:
    source = tensor((60, 2), ranks(0, senders), ROWS)
    target = tensor((60, 2), ranks(senders, senders + receivers), ROWS)
    found = plan(source, target)
    assert len(messages_of(found)) == senders + receivers - math.gcd(senders, receivers)
    assert set(found.received().values()) == {120 // receivers}


@examples(500)
@given(senders=st.integers(1, 9), receivers=st.integers(1, 9), size=st.integers(0, 80))
def test_messages_between_any_cuts_on_other_ranks(senders: int, receivers: int, size: int) -> None:
    """One for each two pieces that meet, which are p + q - gcd(p, q) where all are even."""
    source = tensor((size, 2), ranks(0, senders), ROWS)
    found = plan(source, tensor((size, 2), ranks(senders, senders + receivers), ROWS))
    bounds = {k * size // senders for k in range(senders + 1)}
    bounds |= {k * size // receivers for k in range(receivers + 1)}
    most = senders + receivers - math.gcd(senders, receivers)
    assert len(messages_of(found)) == len(bounds) - 1 <= most
    if size and size % math.lcm(senders, receivers) == 0:
        assert len(messages_of(found)) == most
    pieces = [(k * size // receivers, (k + 1) * size // receivers) for k in range(receivers)]
    received = found.received()
    assert [received.get(senders + k, 0) for k in range(receivers)] == [
        2 * (stop - start) for start, stop in pieces
    ]


@pytest.mark.parametrize(("senders", "receivers"), [(4, 2), (3, 4), (2, 2), (3, 1), (4, 4)])
def test_copies_to_copies_on_other_ranks(senders: int, receivers: int) -> None:
    """Over the slow link go as many bytes as one copy has; the receivers gather the rest."""
    source = tensor((12, 5), ranks(0, senders))
    found = plan(source, tensor((12, 5), ranks(senders, senders + receivers)))
    assert len(messages_of(found)) == senders + receivers - math.gcd(senders, receivers)
    assert sum(volume(message.region) for message in messages_of(found)) == 60
    for rank in range(senders):
        sent = [message for message in messages_of(found) if message.source == rank]
        assert sum(volume(message.region) for message in sent) == 60 // senders
    assert [type(step) for step in found.rounds] == [MoveRound, GatherRound][: 1 + (receivers > 1)]
    assert set(found.received().values()) == {60}


def test_three_ranks_to_four_that_have_three_in_common() -> None:
    """The images of a batch: rows that are on the right rank stay there."""
    found = plan(tensor((48, 7), ranks(0, 3), ROWS), tensor((48, 7), ranks(0, 4), ROWS))
    assert [(m.source, m.target, m.region[0]) for m in messages_of(found)] == [
        (0, 1, ((12, 16),)),
        (1, 2, ((24, 32),)),
        (2, 3, ((36, 48),)),
    ]
    assert sum(found.received().values()) == 24 * 7


def test_cut_to_copies_is_one_gather_of_equal_pieces() -> None:
    found = plan(tensor((12,), ranks(0, 4), ROWS), tensor((12,), ranks(0, 4)))
    assert [len(step.fibres) for step in found.rounds if isinstance(step, GatherRound)] == [1]
    assert messages_of(found) == ()
    assert set(found.received().values()) == {9}


def test_cut_to_copies_takes_messages_where_pieces_are_uneven() -> None:
    found = plan(tensor((10,), ranks(0, 4), ROWS), tensor((10,), ranks(0, 4)))
    assert len(messages_of(found)) == 12
    assert found.received() == {0: 8, 1: 7, 2: 8, 3: 7}


def test_a_gather_is_one_for_each_fibre_in_the_order_of_the_pieces() -> None:
    mesh = Mesh((5, 4, 1, 0), "m", (("dp", 2), ("tp", 2)))
    found = plan(tensor((8,), mesh, {0: ("tp", "dp")}), tensor((8,), mesh))
    gathers = [step for step in found.rounds if isinstance(step, GatherRound)]
    assert [fibre.ranks for step in gathers for fibre in step.fibres] == [(5, 1, 4, 0)]
    found = plan(tensor((8,), mesh, {0: ("tp",)}), tensor((8,), mesh))
    gathers = [step for step in found.rounds if isinstance(step, GatherRound)]
    assert [fibre.ranks for step in gathers for fibre in step.fibres] == [(5, 4), (1, 0)]


def test_two_dimensions_are_gathered_one_after_the_other() -> None:
    mesh = Mesh((0, 1, 2, 3), "m", (("dp", 2), ("tp", 2)))
    found = plan(tensor((4, 6), mesh, {0: ("dp",), 1: ("tp",)}), tensor((4, 6), mesh))
    gathers = [step for step in found.rounds if isinstance(step, GatherRound)]
    assert [[fibre.ranks for fibre in step.fibres] for step in gathers] == [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    ]
    assert messages_of(found) == ()
    assert set(found.received().values()) == {24 * 3 // 4}


def test_packed_blocks_are_gathered_too() -> None:
    """The pieces of a rank are then not in a row: two rows of each of three blocks."""
    mesh = Mesh((0, 1, 2, 3), "m", (("dp", 2), ("tp", 2)))
    source, target = (
        TensorType(DType.F32, (24,), mesh, Layout((Cut(axes, 3),)))
        for axes in (("tp", "dp"), ("tp",))
    )
    found = plan(source, target)
    gathers = [step for step in found.rounds if isinstance(step, GatherRound)]
    assert [fibre.ranks for step in gathers for fibre in step.fibres] == [(0, 2), (1, 3)]
    assert not any(fibre.is_dense for step in gathers for fibre in step.fibres)
    assert messages_of(found) == ()
    assert set(found.received().values()) == {6}


def test_cut_to_another_cut_is_an_exchange_of_all_with_all() -> None:
    found = plan(tensor((8, 8), ranks(0, 4), ROWS), tensor((8, 8), ranks(0, 4), COLUMNS))
    assert len(messages_of(found)) == 12
    assert set(found.received().values()) == {64 * 3 // 16}


@pytest.mark.parametrize("target", [tensor((8, 8), ranks(0, 4), ROWS), tensor((8, 8), ranks(1, 2))])
def test_copies_are_cut_where_they_are(target: TensorType) -> None:
    found = plan(tensor((8, 8), ranks(0, 4)), target)
    assert messages_of(found) == ()
    assert not found.received()


def test_copies_become_a_sum_without_messages() -> None:
    found = plan(tensor((8,), ranks(0, 3)), tensor((8,), ranks(0, 3), summed=SUM))
    assert found.rounds == ()
    assert found.neutral == (1, 2)


def test_copies_become_a_maximum_as_they_are() -> None:
    target = tensor((8,), ranks(0, 3), summed=SUM, reduce=ReduceOp.MAX)
    found = plan(tensor((8,), ranks(0, 3)), target)
    assert (found.rounds, found.neutral) == ((), ())


@pytest.mark.parametrize("size", [8, 9, 1])
def test_summands_to_copies_is_an_all_reduce(size: int) -> None:
    found = plan(tensor((size,), ranks(0, 4), summed=SUM), tensor((size,), ranks(0, 4)))
    (step,) = found.rounds
    assert isinstance(step, ReduceRound)
    assert [(fibre.ranks, fibre.dim) for fibre in step.fibres] == [((0, 1, 2, 3), None)]
    assert set(found.received().values()) == {2 * size * 3 // 4}


def test_summands_to_an_even_cut_is_a_reduce_scatter() -> None:
    found = plan(tensor((8, 3), ranks(0, 4), summed=SUM), tensor((8, 3), ranks(0, 4), ROWS))
    (step,) = found.rounds
    assert isinstance(step, ReduceRound)
    assert [(fibre.ranks, fibre.dim) for fibre in step.fibres] == [((0, 1, 2, 3), 0)]
    assert set(found.received().values()) == {24 * 3 // 4}


def test_summands_to_an_uneven_cut_are_sent() -> None:
    found = plan(tensor((10,), ranks(0, 4), summed=SUM), tensor((10,), ranks(0, 4), ROWS))
    (step,) = found.rounds
    assert isinstance(step, CombineRound)
    assert found.received() == {0: 6, 1: 9, 2: 6, 3: 9}


def test_summands_of_packed_blocks_take_a_reduce_scatter_for_each() -> None:
    source = tensor((24,), ranks(0, 4), summed=SUM)
    found = plan(source, TensorType(DType.F32, (24,), ranks(0, 4), Layout((Cut(("*",), 3),))))
    (step,) = found.rounds
    assert isinstance(step, ReduceRound)
    assert [fibre.region for fibre in step.fibres] == [
        (((start, start + 8),),) for start in (0, 8, 16)
    ]
    assert set(found.received().values()) == {24 * 3 // 4}


def test_summands_along_two_axes_are_those_of_one_fibre() -> None:
    mesh = Mesh((3, 2, 1, 0), "m", (("dp", 2), ("tp", 2)))
    found = plan(tensor((8,), mesh, summed=("dp", "tp")), tensor((8,), mesh))
    (step,) = found.rounds
    assert isinstance(step, ReduceRound)
    assert [fibre.ranks for fibre in step.fibres] == [(3, 2, 1, 0)]


def test_only_what_is_needed_is_reduced() -> None:
    mesh = Mesh((0, 1, 2, 3), "m", (("dp", 2), ("tp", 2)))
    found = plan(tensor((8,), mesh, summed=("tp",)), tensor((8,), mesh, {0: ("dp",)}))
    assert set(found.received().values()) == {2 * 4 // 2}


def test_summands_that_stay_ones_are_not_combined() -> None:
    mesh = Mesh((0, 1, 2, 3), "m", (("dp", 2), ("tp", 2)))
    source = tensor((8,), mesh, summed=("dp", "tp"))
    found = plan(source, tensor((8,), mesh, {0: ("dp",)}, ("tp",)))
    (step,) = found.rounds[:1]
    assert isinstance(step, ReduceRound)
    assert found.received() == dict.fromkeys(range(4), 4)


@pytest.mark.parametrize(("senders", "receivers"), [(4, 2), (2, 4), (4, 4)])
def test_summands_to_a_cut_on_other_ranks(senders: int, receivers: int) -> None:
    source = tensor((24,), ranks(0, senders), summed=SUM)
    found = plan(source, tensor((24,), ranks(senders, senders + receivers), ROWS))
    assert [type(step) for step in found.rounds] == [ReduceRound, MoveRound]
    assert len(messages_of(found)) == senders + receivers - math.gcd(senders, receivers)
    expected = dict.fromkeys(range(senders), 24 * (senders - 1) // senders)
    expected |= dict.fromkeys(range(senders, senders + receivers), 24 // receivers)
    assert found.received() == expected


def test_copies_of_summands_reduce_a_share_each() -> None:
    mesh = Mesh((0, 1, 2, 3), "m", (("dp", 2), ("tp", 2)))
    found = plan(tensor((8,), mesh, summed=("tp",)), tensor((8,), Place.of(4, 5), ROWS))
    assert found.received() == {0: 2, 1: 2, 2: 2, 3: 2, 4: 4, 5: 4}


def test_a_scalar_goes_whole() -> None:
    found = plan(tensor((), ranks(0, 3)), tensor((), ranks(3, 5)))
    assert [(m.source, m.target) for m in messages_of(found)] == [(0, 3), (1, 4)]
    found = plan(tensor((), ranks(0, 3), summed=SUM), tensor((), ranks(3, 5)))
    assert [(m.source, m.target) for m in messages_of(found)] == [(1, 0), (2, 0), (0, 3), (0, 4)]


def test_types_that_no_transfer_is_between() -> None:
    with pytest.raises(ValueError, match="keeps element type and shape"):
        plan(tensor((8,), ranks(0, 2)), tensor((9,), ranks(0, 2)))
    with pytest.raises(ValueError, match="between places"):
        plan(tensor((8,), ranks(0, 2)), TensorType(DType.F32, (8,)))


# A thousand ranks: what is looked at grows with the messages, not with the pairs of ranks


def _mesh(name: str, first: int, dp: int, tp: int) -> Mesh:
    return Mesh(tuple(range(first, first + dp * tp)), name, (("dp", dp), ("tp", tp)))


@pytest.mark.parametrize("size", [4096, 5000])
def test_a_thousand_ranks_to_as_many(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_overlaps(monkeypatch)
    found = plan(
        tensor((size, 8), ranks(0, 1024), ROWS), tensor((size, 8), ranks(1024, 2048), ROWS)
    )
    assert len(messages_of(found)) == 1024
    assert len(calls) < 8 * 1024


def test_a_grid_of_a_thousand_ranks_to_an_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_overlaps(monkeypatch)
    cuts = {0: ("dp",), 1: ("tp",)}
    source = tensor((4096, 512), _mesh("m", 0, 32, 32), cuts)
    found = plan(source, tensor((4096, 512), _mesh("n", 1024, 32, 32), cuts))
    assert len(messages_of(found)) == 1024
    assert len(calls) < 80 * 1024


def _count_overlaps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def counted(one: object, other: object) -> object:
        calls.append(one)
        return overlap(one, other)  # type: ignore[arg-type]

    monkeypatch.setattr(resharding, "overlap", counted)
    monkeypatch.setattr(resharding_messages, "overlap", counted)
    return calls
