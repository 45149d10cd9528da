"""Models whose tokens and experts are cut train alike in processes of their own."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytest.importorskip("transformers")
pytestmark = [*needs_mpi, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "names",
    [
        ("tp 2 in two stages", "ep 2, cp 2"),
        pytest.param(("cp 2, tp 2",), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(names: tuple[str, ...]) -> None:
    """Each rank compares its pieces with plain transformers."""
    ended = run(4, ["-m", "tests.models.cut_tokens", *names], seconds=300, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("agrees") == len(names) * 4
