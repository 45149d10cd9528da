"""Messages about graphs that are open when the interpreter exits."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cg.launch.runtime import driven_graphs as graphs


class World:
    is_virtual = False


@pytest.mark.parametrize(
    ("driver", "fails", "said"),
    [(0, False, []), (0, True, [True]), (1, False, [True])],
    ids=["closed", "cannot be closed", "of another rank"],
)
def test_who_leaves_open_graphs_says_so(
    driver: int, fails: bool, said: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    world: Any = World()
    told: list[bool] = []
    opened = {7: SimpleNamespace(driver=driver, overdue=False)}

    def close(graph: Any, at_once: bool) -> None:
        if fails:
            raise RuntimeError("an execution was interrupted")
        opened.clear()

    executions: Any = SimpleNamespace(graphs=opened, schedulers={0: None}, close=close)
    transport = SimpleNamespace(close=lambda deserts: told.append(deserts))
    monkeypatch.setattr(graphs, "transport_of", lambda world: transport)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(
        atexit, "register", lambda hook, *args: at_exit.append(partial(hook, *args))
    )
    graphs.use_executions(world, executions)
    (hook,) = at_exit
    if fails:
        with pytest.raises(RuntimeError, match="interrupted"):
            hook()
    else:
        hook()
    assert told == said
