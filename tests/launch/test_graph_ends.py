"""Messages about graphs that are open when the interpreter exits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

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
    monkeypatch.setitem(graphs._worlds, world, executions)
    if fails:
        with pytest.raises(RuntimeError, match="interrupted"):
            graphs._close_all(ref(world))
    else:
        graphs._close_all(ref(world))
    assert told == said
