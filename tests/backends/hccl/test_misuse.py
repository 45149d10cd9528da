"""The mock refuses calls that break HCCL's rules, and each misuse has its own error."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cg.backends.errors import BindError
from cg.backends.hccl.abi import SendRecvItem
from cg.backends.streams.library import CommunicationError, RawMessage
from cg.ir.attributes import Stream
from cg.ir.ops.module import Channel

from .ranks import Raised, Rank, on_ranks

F32, F64, SUM = 4, 10, 0


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def settled(rank: Rank, comm: Any, kind: Stream = Stream.MESSAGE) -> str | None:
    """The library's report of a communicator, once its work is over or has failed."""
    deadline = time.monotonic() + 60
    mark = rank.device.event()
    mark.record(rank.stream(kind))
    try:
        while not mark.query():
            assert time.monotonic() < deadline, "the stream is stuck"
            time.sleep(0.005)
    except RuntimeError:
        pass
    return rank.library.error(comm)


def both(path: Path, job: Callable[[Rank], Any], **variables: str) -> list[Any]:
    return on_ranks(2, path, job, variables)


# -- what HCCL refuses when it is called ------------------------------------------------------


def refused(path: Path, call: Callable[[Rank, Any], Any]) -> str:
    """The error that rank 0 gets of one call on a communicator of two."""

    def job(rank: Rank) -> str | None:
        comm = rank.comm()
        if rank.rank:
            return None
        with pytest.raises(CommunicationError) as raised:
            call(rank, comm)
        return str(raised.value)

    found = both(path, job)[0]
    assert isinstance(found, str), found
    return found


def test_an_unsupported_type(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        data = values(1.0, 2.0)
        pointer = data.data_ptr()
        rank.library.all_reduce(pointer, pointer, 1, F64, SUM, comm, rank.stream())

    text = refused(mock, call)
    assert text.startswith(
        "rank 0: HcclAllReduce of 1 elements of type 10, op 0: not support feature (HCCL result 5)."
    )
    assert "let the value take another way by cg.via(x, 'cpu')" in text


def test_an_unaligned_address(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        pointer = values(1.0, 2.0, 3.0).data_ptr() + 2
        rank.library.all_reduce(pointer, pointer, 1, F32, SUM, comm, rank.stream())

    assert "HcclAllReduce of 1 elements of type 4, op 0: parameter error" in refused(mock, call)


def test_a_rank_that_there_is_not(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        rank.library.send(values(1.0).data_ptr(), 4, 7, comm, rank.stream())

    assert "HcclSend of 4 bytes to member 7: parameter error" in refused(mock, call)


def test_a_communicator_that_has_been_given_up(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        rank.library.destroy(comm)
        rank.library.recv(values(1.0).data_ptr(), 4, 1, comm, rank.stream())

    assert "HcclRecv of 4 bytes from member 1: empty pointer" in refused(mock, call)


def test_something_else_than_a_stream(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        buffer = ctypes.create_string_buffer(256)
        address = (ctypes.addressof(buffer) + 15) // 16 * 16
        queue = SimpleNamespace(npu_stream=address)
        rank.library.send(values(1.0).data_ptr(), 4, 1, comm, queue)

    assert "HcclSend of 4 bytes to member 1: empty pointer" in refused(mock, call)


def test_arguments_in_the_order_of_nccl(mock: Path) -> None:
    """`ncclCommInitRank(comm, n, id, rank)`: there is no pointer then where HCCL wants one."""

    def job(rank: Rank) -> int:
        raw = ctypes.CDLL(str(mock)).HcclCommInitRootInfo
        raw.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32]
        comm = ctypes.c_void_p()
        return int(raw(ctypes.addressof(comm), 1, rank.library.unique_id(), 0))

    assert on_ranks(1, mock, job) == [2]  # HCCL_E_PTR


def test_structures_of_the_wrong_size(mock: Path) -> None:
    """A batch of packed items: the second one is read from where it does not lie."""

    class Packed(ctypes.Structure):
        _pack_ = 1
        _fields_ = SendRecvItem._fields_

    def call(rank: Rank, comm: Any) -> None:
        data = values(1.0, 2.0)
        items = (Packed * 2)(
            Packed(0, data.data_ptr(), 4, 7, 1), Packed(1, data.data_ptr() + 4, 4, 7, 1)
        )
        given = ctypes.cast(items, ctypes.POINTER(SendRecvItem))
        code = rank.symbols.get("HcclBatchSendRecv")(given, 2, comm, rank.stream().npu_stream)
        rank.library._fail("HcclBatchSendRecv", code, "of packed items")

    assert "HcclBatchSendRecv of packed items: " in refused(mock, call)


def test_a_root_info_that_is_cut_off(mock: Path) -> None:
    def job(rank: Rank) -> list[str]:
        whole = rank.library.unique_id()
        texts = []
        for given in (whole[:-8], whole[:-8] + bytes(8)):
            with pytest.raises(CommunicationError) as raised:
                rank.library.connect(1, given, 0)
            texts.append(str(raised.value))
        return texts

    (texts,) = on_ranks(1, mock, job)
    assert texts[0] == "rank 0: HCCL's root info has 4108 bytes, and 4100 were given"
    assert texts[1].startswith("rank 0: HcclCommInitRootInfo as member 0 of 1: parameter error")


def test_two_communicators_begun_at_once(mock: Path) -> None:
    def job(rank: Rank) -> str:
        rank.library.unique_id()
        with pytest.raises(CommunicationError) as raised:
            rank.library.unique_id()
        return str(raised.value)

    (text,) = on_ranks(1, mock, job)
    assert text.startswith("rank 0: HcclGetRootInfo to begin a communicator: resource unavailable")
    assert "HCCL_HOST_SOCKET_PORT_RANGE=auto" in text


def test_nobody_comes(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        key = rank.world.allgather(rank.library.unique_id())[0]
        if rank.rank:
            return None
        with pytest.raises(CommunicationError) as raised:
            rank.library.connect(2, key, 0)
        return str(raised.value)

    text = both(mock, job, MOCK_HCCL_CONNECT_SECONDS="0.3")[0]
    assert text.startswith("rank 0: HcclCommInitRootInfo as member 0 of 2: timeout")
    assert "HCCL_CONNECT_TIMEOUT is how long it waits while ranks are joined" in text


# -- what shows when ranks meet ---------------------------------------------------------------


def test_an_operation_without_a_pair(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        comm, data = rank.comm(), values(1.0, 2.0)
        if rank.rank == 0:
            rank.library.send(data.data_ptr(), 8, 1, comm, rank.stream())
        return settled(rank, comm)

    assert both(mock, job, HCCL_EXEC_TIMEOUT="1") == ["timeout (HCCL result 9)", None]


def test_two_sends_to_each_other(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        comm, data = rank.comm(), values(1.0, 2.0)
        rank.library.send(data.data_ptr(), 8, 1 - rank.rank, comm, rank.stream())
        return settled(rank, comm)

    assert both(mock, job) == ["communication operation remote error (HCCL result 21)"] * 2


def test_messages_that_cross_on_streams_of_their_own(mock: Path) -> None:
    """As HCCL's reference says, the next one begins when the other end of the last has come."""

    def job(rank: Rank) -> str | None:
        comms, data = [rank.comm(), rank.comm()], values(1.0, 2.0)
        peer, library = 1 - rank.rank, rank.library
        library.recv(data.data_ptr(), 4, peer, comms[peer], rank.stream(Stream.RECV))
        library.send(data.data_ptr() + 4, 4, peer, comms[rank.rank], rank.stream(Stream.SEND))
        return settled(rank, comms[peer], Stream.RECV) or library.error(comms[rank.rank])

    found = both(mock, job, HCCL_EXEC_TIMEOUT="1")
    # Who gives up first goes on to its send, which may reach the other one just in time.
    assert "timeout (HCCL result 9)" in found
    assert set(found) <= {"timeout (HCCL result 9)", None}


def test_messages_that_cross_as_one(mock: Path) -> None:
    def job(rank: Rank) -> list[float]:
        comm, data, peer = rank.comm(), values(rank.rank, 0.0), 1 - rank.rank
        items = [
            RawMessage(False, peer, data.data_ptr(), 4),
            RawMessage(True, peer, data.data_ptr() + 4, 4),
        ]
        rank.library.batch(items[:: 1 - 2 * rank.rank], comm, rank.stream())
        assert settled(rank, comm) is None
        return data.tolist()

    assert both(mock, job) == [[0.0, 1.0], [1.0, 0.0]]


def test_a_batch_of_which_the_other_rank_has_a_part(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        comm, data, peer = rank.comm(), values(1.0, 2.0), 1 - rank.rank
        items = [
            RawMessage(False, peer, data.data_ptr(), 4),
            RawMessage(True, peer, data.data_ptr() + 4, 4),
        ]
        rank.library.batch(items[rank.rank :], comm, rank.stream())
        return settled(rank, comm)

    assert both(mock, job) == ["communication operation remote error (HCCL result 21)"] * 2


def test_two_messages_in_one_direction_in_a_batch(mock: Path) -> None:
    def call(rank: Rank, comm: Any) -> None:
        data = values(1.0, 2.0)
        items = [RawMessage(False, 1, data.data_ptr() + 4 * i, 4) for i in range(2)]
        rank.library.batch(items, comm, rank.stream())

    text = refused(mock, call)
    assert "HcclBatchSendRecv of 2 messages with member 1: parameter error" in text


def test_messages_of_other_sizes(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        comm, data = rank.comm(), values(1.0, 2.0)
        if rank.rank == 0:
            rank.library.send(data.data_ptr(), 8, 1, comm, rank.stream())
        else:
            rank.library.recv(data.data_ptr(), 4, 0, comm, rank.stream())
        return settled(rank, comm)

    assert both(mock, job) == ["communication operation remote error (HCCL result 21)"] * 2


def test_collectives_in_another_order(mock: Path) -> None:
    def job(rank: Rank) -> str | None:
        comm, data, room = rank.comm(), values(1.0, 2.0), values(0.0, 0.0, 0.0, 0.0)
        for first in (rank.rank == 0, rank.rank != 0):
            if first:
                rank.library.all_reduce(
                    data.data_ptr(), data.data_ptr(), 2, F32, SUM, comm, rank.stream()
                )
            else:
                rank.library.all_gather(data.data_ptr(), room.data_ptr(), 8, comm, rank.stream())
        return settled(rank, comm)

    assert both(mock, job) == ["communication operation remote error (HCCL result 21)"] * 2


def test_a_send_waits_for_its_receive(mock: Path) -> None:
    """Rendezvous: nothing is buffered."""

    def job(rank: Rank) -> list[bool]:
        comm, data, mark = rank.comm(), values(3.0), rank.device.event()
        if rank.rank:
            rank.world.barrier()
            rank.library.recv(data.data_ptr(), 4, 0, comm, rank.stream())
            return [settled(rank, comm) is None, float(data) == 3.0]
        rank.library.send(data.data_ptr(), 4, 1, comm, rank.stream())
        mark.record(rank.stream())
        time.sleep(0.1)
        waits = not mark.query()
        rank.world.barrier()
        mark.synchronize()
        return [waits]

    assert both(mock, job) == [[True], [True, True]]


def test_work_of_a_stream_is_handed_over_before_a_message(mock: Path) -> None:
    """The raw stream is asked for at each call: that drains torch_npu's queue."""

    def job(rank: Rank) -> list[int]:
        import torch_npu  # type: ignore[import-not-found]

        comm, data = rank.comm(), values(3.0)
        queue, found = rank.stream(), []
        mark = rank.device.event()
        for _ in range(2):
            mark.record(rank.device.stream(Stream.COPY))
            queue.wait_event(mark)
            found.append(len(torch_npu.tasks))
            call = rank.library.recv if rank.rank else rank.library.send
            call(data.data_ptr(), 4, 1 - rank.rank, comm, queue)
            found.append(len(torch_npu.tasks))
        assert settled(rank, comm) is None
        return found

    assert both(mock, job) == [[2, 0, 2, 0]] * 2


# -- the communicators of a process -----------------------------------------------------------


EDGES = [
    Channel(0, (0, 1)),
    Channel(1, (1, 0)),
    Channel(2, (0, 1), collective=True),
]


def test_groups_are_joined_one_after_the_other(mock: Path) -> None:
    def job(rank: Rank) -> list[int]:
        pool = rank.pool()
        lines = pool.join(EDGES).lines
        again = pool.join(EDGES).lines
        assert all(lines[i] is again[i] for i in lines)
        pool.close()
        return sorted(lines)

    assert both(mock, job) == [[0, 1, 2]] * 2


def test_after_a_failure_without_messages_under_way(mock: Path) -> None:
    def job(rank: Rank) -> bool:
        pool, data = rank.pool(), values(1.0 - rank.rank)
        line = pool.join(EDGES).lines[0]
        before = line.comm
        pool.abort()
        pool.reset()
        if rank.rank == 0:
            rank.library.send(data.data_ptr(), 4, 1, line.comm, rank.stream())
        else:
            rank.library.recv(data.data_ptr(), 4, 0, line.comm, rank.stream())
        pool.close()
        return line.comm is None and before is not None and float(data) == 1.0

    assert both(mock, job) == [True, True]


def test_after_a_failure_with_messages_under_way(mock: Path) -> None:
    """HCCL cannot break them off: all ranks are told that nothing more can be sent."""

    def job(rank: Rank) -> list[str]:
        pool, data = rank.pool(grace=0.3), values(1.0)
        line = pool.join(EDGES).lines[0]
        if rank.rank == 0:
            rank.library.send(data.data_ptr(), 4, 1, line.comm, rank.stream())
        texts = []
        pool.abort()
        for call in (pool.reset, pool.reset, lambda: pool.join(EDGES)):
            with pytest.raises(CommunicationError) as raised:
                call()
            texts.append(str(raised.value))
        pool.close()
        return texts

    for texts in both(mock, job):
        assert len(set(texts)) == 1
        assert "HCCL cannot break them off (rank 0: a message waits for its other end)" in texts[0]
        assert "start again from a checkpoint" in texts[0]


def test_too_many_communicators(mock: Path) -> None:
    def job(rank: Rank) -> Any:
        return rank.pool().join([Channel(i, (0, i)) for i in range(1, 40)])

    (raised,) = on_ranks(1, mock, job)
    assert isinstance(raised, Raised)
    assert raised.kind == "BindError"
    assert "rank 0 would be a member of 39 HCCL communicators" in raised.text
    assert "32 is the most" in raised.text


def test_what_no_open_plan_uses_makes_room(mock: Path) -> None:
    def job(rank: Rank) -> Any:
        pool: Any = rank.pool()
        pool.limit = 1
        pair = pool.join(EDGES[:2])
        with pytest.raises(BindError, match="this step needs 1, and open ones hold 1 more"):
            pool.join(EDGES[2:])
        pool.leave(pair)
        comm = pair.lines[0].comm
        lines = pool.join(EDGES[2:]).lines
        with pytest.raises(CommunicationError):
            rank.library.send(values(1.0).data_ptr(), 4, 1 - rank.rank, comm, rank.stream())
        return pair.lines[0].comm is None, sorted(lines)

    assert both(mock, job) == [(True, [2])] * 2
