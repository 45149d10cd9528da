"""Which of many connections that come at once the front lets in."""

from __future__ import annotations

import asyncio
import sys

import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.connections import Gate, Refusal


class CountingServer:
    """Counts a connection in the turn of the loop behind the one that accepted it."""

    def __init__(self) -> None:
        self.connections: list[asyncio.Protocol] = []

    def __call__(self) -> asyncio.Protocol:
        made = asyncio.Protocol()
        asyncio.get_running_loop().call_soon(self.connections.append, made)
        return made


@pytest.mark.parametrize("at_once", [1, 2, 5, 12])
def test_as_many_are_let_in_as_there_may_be(at_once: int) -> None:
    """However many a turn of the loop accepts, none is refused before the bound is reached."""

    async def come() -> list[bool]:
        gate = Gate(CountingServer(), 10)  # type: ignore[arg-type]
        refused = []
        while len(refused) < 12:
            refused += [isinstance(gate.connect(), Refusal) for _ in range(at_once)]
            await asyncio.sleep(0)
        return refused[:12]

    assert asyncio.run(come()) == [False] * 10 + [True] * 2
