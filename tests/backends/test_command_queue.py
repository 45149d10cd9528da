"""Queues decode commands once, do them in order, and hold them until their time has come."""

from __future__ import annotations

from collections import deque

from cg.backends.driven.commands import Action, Command, CommandKind, CommandQueue


class Driver:
    """Writes commands, and gives their actions."""

    def __init__(self) -> None:
        self.commands: deque[int] = deque()
        self.asked: list[tuple[int, Command]] = []
        self.done: list[Command] = []
        self.busy = False
        self.queue = CommandQueue(
            3, lambda: self.commands.popleft() if self.commands else 0, self.ask
        )

    def ask(self, rank: int, command: Command) -> Action:
        self.asked.append((rank, command))

        def action() -> bool:
            if not self.busy:
                self.done.append(command)
            return not self.busy

        return action


FIRST, SECOND = Command(CommandKind.EXECUTE, 0), Command(CommandKind.EXECUTE, 1)


def test_commands_are_decoded_once_and_done_each_time() -> None:
    driver = Driver()
    driver.commands.extend(each.pack() for each in (FIRST, SECOND, FIRST))
    assert [driver.queue.take() for _ in range(4)] == [True, True, True, False]
    assert driver.done == [FIRST, SECOND, FIRST]
    assert driver.asked == [(3, FIRST), (3, SECOND)]


def test_a_command_whose_time_is_not_come_holds_up_the_others() -> None:
    driver = Driver()
    driver.commands.extend(each.pack() for each in (FIRST, SECOND))
    driver.busy = True
    assert not driver.queue.take()
    assert not driver.queue.take()
    driver.busy = False
    assert driver.queue.take()
    assert driver.queue.take()
    assert driver.done == [FIRST, SECOND]


def test_what_is_dropped_is_not_done() -> None:
    driver = Driver()
    driver.commands.extend(each.pack() for each in (FIRST, SECOND))
    driver.busy = True
    driver.queue.take()
    assert [driver.queue.drop() for _ in range(3)] == [FIRST.pack(), SECOND.pack(), 0]
    driver.busy = False
    assert not driver.queue.take()


def test_a_closed_graph_is_forgotten_and_no_other() -> None:
    driver = Driver()
    for command in (FIRST, SECOND):
        driver.commands.append(command.pack())
        driver.queue.take()
    driver.queue.forget(0)
    driver.commands.extend(each.pack() for each in (FIRST, SECOND))
    while driver.queue.take():
        pass
    assert [command for _, command in driver.asked] == [FIRST, SECOND, FIRST]
