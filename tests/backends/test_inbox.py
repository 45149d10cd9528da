"""Inboxes: records are understood once, done in order, and held until their time has come."""

from __future__ import annotations

from collections import deque

from cg.backends.driven.command_queue import Inbox, Order
from cg.backends.driven.records import Kind, Record


class Driver:
    """Writes records, and says what they mean."""

    def __init__(self) -> None:
        self.records: deque[int] = deque()
        self.asked: list[tuple[int, Record]] = []
        self.done: list[Record] = []
        self.busy = False
        self.inbox = Inbox(3, lambda: self.records.popleft() if self.records else 0, self.ask)

    def ask(self, rank: int, record: Record) -> Order:
        self.asked.append((rank, record))

        def order() -> bool:
            if not self.busy:
                self.done.append(record)
            return not self.busy

        return order


FIRST, SECOND = Record(Kind.EXECUTE, 0), Record(Kind.EXECUTE, 1)


def test_records_are_understood_once_and_done_each_time() -> None:
    driver = Driver()
    driver.records.extend(each.pack() for each in (FIRST, SECOND, FIRST))
    assert [driver.inbox.take() for _ in range(4)] == [True, True, True, False]
    assert driver.done == [FIRST, SECOND, FIRST]
    assert driver.asked == [(3, FIRST), (3, SECOND)]


def test_a_record_whose_time_is_not_come_holds_up_the_others() -> None:
    driver = Driver()
    driver.records.extend(each.pack() for each in (FIRST, SECOND))
    driver.busy = True
    assert not driver.inbox.take()
    assert not driver.inbox.take()
    driver.busy = False
    assert driver.inbox.take()
    assert driver.inbox.take()
    assert driver.done == [FIRST, SECOND]


def test_what_is_dropped_is_not_done() -> None:
    driver = Driver()
    driver.records.extend(each.pack() for each in (FIRST, SECOND))
    driver.busy = True
    driver.inbox.take()
    assert [driver.inbox.drop() for _ in range(3)] == [FIRST.pack(), SECOND.pack(), 0]
    driver.busy = False
    assert not driver.inbox.take()


def test_a_closed_graph_is_forgotten_and_no_other() -> None:
    driver = Driver()
    for record in (FIRST, SECOND):
        driver.records.append(record.pack())
        driver.inbox.take()
    driver.inbox.forget(0)
    driver.records.extend(each.pack() for each in (FIRST, SECOND))
    while driver.inbox.take():
        pass
    assert [record for _, record in driver.asked] == [FIRST, SECOND, FIRST]
