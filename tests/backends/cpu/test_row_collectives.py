"""Collectives of rows: what ids send to a member's experts travels, once, and nothing else does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cg.backends.cpu.communicator import CpuCommunicator
from cg.backends.cpu.queues import moving_rows
from cg.backends.cpu.queues.local_sender import LocalSender
from cg.backends.cpu.queues.messages import Outgoing
from cg.backends.cpu.queues.moving_rows import KnownRows, MemberRows, MovingRows
from cg.backends.errors import TransportError
from cg.backends.exchanges import outcomes
from cg.ir.layout import Region
from cg.ir.ops import AllGatherRows, ReduceScatterRows, RowCollective, Value
from cg.ir.ops.module import Channel
from cg.ir.types import DType, Place, TensorType

from .world import ThreadWorld, run_communicators, wait

ROWS, WIDTH, EXPERTS, CHOICES, ROUTINGS = 12, 5, 7, 2, 300
GROUPS = {2: (1, 0), 3: (2, 0, 1)}


def experts(count: int) -> tuple[Region, ...]:
    """Uneven pieces; of three ranks the last has none."""
    if count == 2:
        return (((0, 3),),), (((3, EXPERTS),),)
    return (((0, 3),),), (((3, EXPERTS),),), ((),)


def routings() -> Iterator[Tensor]:
    """Ids of random rows, of rows that avoid an expert, and of rows that all take the same."""
    generator = torch.Generator().manual_seed(1)
    yield torch.tensor([[0, 1]] * ROWS)
    yield torch.tensor([[5, 6]] * ROWS)
    for index in range(ROUTINGS):
        likely = torch.rand(EXPERTS, generator=generator) + 0.01
        likely[index % EXPERTS] = 0
        yield torch.multinomial(likely.expand(ROWS, -1), CHOICES, generator=generator)


def op_of(kind: type[RowCollective], group: tuple[int, ...], lead: int, made: TensorType) -> Any:
    ids = TensorType(DType.I64, (ROWS, CHOICES))
    types = [made] * len(group) + [ids] * len(group)
    return kind(
        tuple(Value(f"v{i}", type_) for i, type_ in enumerate(types)),
        tuple(Value(f"r{i}", made) for i in range(len(group))),
        group=Place(group),
        experts=experts(len(group)),
        lead=lead,
    )


def operands(group: tuple[int, ...], shape: tuple[int, ...], ids: Tensor, own: bool) -> list[Any]:
    """A pair for each member; with `own`, zeros in the rows of others, as summands have."""
    tensors = []
    for index, region in enumerate(experts(len(group))):
        x = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) * (index + 1)
        if own:
            by_row = ids.reshape(shape[0] if len(shape) == 2 else shape[0] * shape[1], -1)
            is_own = torch.zeros(len(by_row), dtype=torch.bool)
            for first, last in region[0]:
                is_own |= ((by_row >= first) & (by_row < last)).any(1)
            x = x * is_own.view(*shape[:-1], 1)
        tensors.append((x, ids))
    return tensors


@pytest.mark.parametrize("count", GROUPS)
@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize("kind", [AllGatherRows, ReduceScatterRows])
def test_rows_that_move_are_those_of_the_ids(
    kind: type[RowCollective], lead: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of the definition, and the messages have the bytes of their rows."""
    group = GROUPS[count]
    gathers = kind is AllGatherRows
    part, inner = ROWS // count, (CHOICES,) if lead == 2 else ()
    whole, piece = (ROWS, *inner, WIDTH), (part, *inner, WIDTH)
    given, made = (piece, whole) if gathers else (whole, piece)
    op = op_of(kind, group, lead, TensorType(DType.F32, given))
    sent: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    send = LocalSender.send

    def counted(queue: LocalSender, message: Outgoing) -> None:
        sent[queue.node.rank] += message.nbytes
        messages[queue.node.rank] += 1
        send(queue, message)

    monkeypatch.setattr(LocalSender, "send", counted)
    channel = Channel(0, group, collective=True)
    all_ids = list(routings())

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> list[Tensor]:
        if world.rank not in group:
            return []
        member = group.index(world.rank)
        types = TensorType(DType.F32, given), TensorType(DType.F32, made)
        port = communicator.collective_port(op, channel, *types)
        results = []
        for ids in all_ids:
            port.start(operands(group, given, ids, own=not gathers)[member])
            wait(port)
            results.append(port.take())
            port.release()
        return results

    results = run_communicators(4, [channel], body)
    bound: Counter[int] = Counter()
    for number, ids in enumerate(all_ids):
        pairs = operands(group, given, ids, own=not gathers)
        expected = outcomes(op.exchange, pairs)
        for member, rank in enumerate(group):
            assert torch.equal(results[rank][number], expected[member])
            bound[rank] += 4 * WIDTH * rows_to_others(ids, member, count, lead, gathers)
        if not gathers:  # summands have zeros wherever ids are of others, so all of them are added
            total = sum(tensor for tensor, _ in pairs)
            assert torch.equal(torch.cat(expected), total)
    assert sent == bound
    assert messages == dict.fromkeys(group, len(all_ids))


def rows_to_others(ids: Tensor, member: int, count: int, lead: int, gathers: bool) -> int:
    """The rows that others need of a member, one by one: each once, however many need it."""
    part, regions, rows = ROWS // count, experts(count), 0
    by_row = ids.tolist() if lead == 1 else [[i] for row in ids.tolist() for i in row]
    size = part * len(by_row) // ROWS
    for row, chosen in enumerate(by_row):
        owner = row // size
        having = {
            rank
            for rank, (intervals,) in enumerate(regions)
            if any(first <= i < last for i in chosen for first, last in intervals)
        }
        if gathers:
            rows += owner == member and bool(having - {member})
        else:
            rows += owner != member and member in having
    return rows


@pytest.mark.parametrize("kind", [AllGatherRows, ReduceScatterRows])
def test_a_message_to_one_receiver_has_its_rows_alone(kind: type[RowCollective]) -> None:
    """Between machines each receiver has a message of its own; rows are counted one by one."""
    count, part = 3, ROWS // 3
    op = op_of(kind, GROUPS[count], 1, TensorType(DType.F32, (ROWS, WIDTH)))
    regions = experts(count)
    for ids in routings():
        of_members = MemberRows(op.exchange.routed, (ROWS, WIDTH), ids)
        moving = MovingRows(op.exchange, of_members)
        for source, receiver in itertools.permutations(range(count), 2):
            having, owner = (receiver, source) if kind is AllGatherRows else (source, receiver)
            rows = [
                row
                for row in range(owner * part, (owner + 1) * part)
                if any(a <= i < b for i in ids[row].tolist() for a, b in regions[having][0])
            ]
            positions, places = moving.taken(source, [receiver], receiver)
            assert positions is None
            start = 0 if kind is AllGatherRows else owner * part
            assert places.tolist() == [row - start for row in rows]
            start = owner * part if kind is AllGatherRows else 0
            assert moving.sent(source, [receiver]).tolist() == [row - start for row in rows]


def test_exchanges_of_the_same_ids_have_their_rows_in_common() -> None:
    """Other numbers, shapes and experts have rows of their own, and so many are kept."""
    op = op_of(AllGatherRows, GROUPS[3], 1, TensorType(DType.F32, (ROWS, WIDTH)))
    routed, known = op.exchange.routed, KnownRows()
    ids = torch.tensor([[0, 5]] * ROWS)
    rows = known.of(routed, (ROWS, WIDTH), ids)
    assert known.of(routed, (ROWS, 2 * WIDTH), ids) is rows
    assert known.of(routed, (ROWS, WIDTH), ids.clone()) is rows
    assert known.of(routed, (ROWS, WIDTH), ids.int()) is not rows
    by_choice = known.of(replace(routed, lead=2), (ROWS, CHOICES, WIDTH), ids)
    assert by_choice.part == CHOICES * rows.part
    other = known.of(replace(routed, experts=routed.experts[::-1]), (ROWS, WIDTH), ids)
    assert [len(other.rows(m, 0)) for m in range(3)] == [0, ROWS // 3, ROWS // 3]
    assert [len(rows.rows(m, 0)) for m in range(3)] == [ROWS // 3, ROWS // 3, 0]
    for number in range(2 * moving_rows._MOST):
        known.of(routed, (ROWS, WIDTH), torch.tensor([[number % 6, number // 6]] * ROWS))
    assert len(known._known) == moving_rows._MOST


def test_rows_are_those_of_ids_that_another_process_writes() -> None:
    """Their memory is shared, or a NumPy array's: torch does not count what is written there."""
    op = op_of(AllGatherRows, GROUPS[3], 1, TensorType(DType.F32, (ROWS, WIDTH)))
    routed, known = op.exchange.routed, KnownRows()
    memory = bytearray(torch.tensor([[0, 5]] * ROWS).numpy().tobytes())
    ids = torch.frombuffer(memory, dtype=torch.int64).view(ROWS, CHOICES)
    before = known.of(routed, (ROWS, WIDTH), ids)
    assert len(before.rows(2, 0)) == 0
    memory[:] = torch.tensor([[4, 5]] * ROWS).numpy().tobytes()
    after = known.of(routed, (ROWS, WIDTH), ids)
    expected = MemberRows(routed, (ROWS, WIDTH), torch.tensor([[4, 5]] * ROWS))
    for member in range(3):
        assert torch.equal(after.rows(member, 0), expected.rows(member, 0))


def test_other_ids_on_another_rank_are_an_error() -> None:
    """Members would take rows for others than they are, so the number of rows is compared."""
    group = GROUPS[2]
    type_ = TensorType(DType.F32, (ROWS // 2, WIDTH))
    op = op_of(AllGatherRows, group, 1, type_)
    channel = Channel(0, group, collective=True)

    def body(communicator: CpuCommunicator, world: ThreadWorld) -> str:
        if world.rank not in group:
            return ""
        member = group.index(world.rank)
        result = TensorType(DType.F32, (ROWS, WIDTH))
        port = communicator.collective_port(op, channel, type_, result)
        ids = torch.full((ROWS, CHOICES), 6 * member)
        port.start((torch.ones(ROWS // 2, WIDTH), ids))
        wait(port)
        try:
            port.take()
        except TransportError as error:
            return str(error)
        return ""

    errors = run_communicators(4, [channel], body)
    assert any("same on all ranks" in error for error in errors)
