"""What a method on a mesh draws at random is what it draws on one rank, wherever it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import cg
from tests.sampling import examples

from ...worlds import virtual_world
from .training import WIDTH, assert_close, cut_out, region_of

Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "nothing": lambda x: x,
    "dropout": lambda x: functional.dropout(x, 0.4),
    "all dropped": lambda x: functional.dropout(x, 1.0),
    "two dropouts": lambda x: functional.dropout(functional.dropout(x, 0.2), 0.3),
    "of columns": lambda x: functional.dropout(x.transpose(0, 1), 0.4).transpose(0, 1),
    "whole features": lambda x: functional.dropout1d(x, 0.4),
    "bernoulli": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "a path": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "rand like": lambda x: x * torch.rand_like(x),
    "like columns": lambda x: x * torch.randn_like(x.transpose(0, 2)).transpose(0, 2),
    "integers": lambda x: x + torch.randint_like(x, 5),
    "normal": lambda x: x + torch.randn(x.shape),
    "written": lambda x: x + (x * 1).normal_(0, 2),
}
COINS = "coins"
DRAWS_ONE_BY_ONE = {
    **DRAWS,
    COINS: lambda x: x * torch.bernoulli(torch.sigmoid(x).detach()),  # of each entry's own value
}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 1, "tp": 2}},
    "dp": {"mesh": {"dp": 2, "tp": 1}},
    "both": {"mesh": {"dp": 2, "tp": 2}},
    "stored": {"mesh": {"dp": 3, "tp": 2}, "store": cg.cut(0, "dp")},
}
PLAN = {
    "forward(x)": cg.cut(0, "dp"),
    "*.up.*": cg.cut(0, "tp"),
    "*.down.weight": cg.cut(1, "tp"),
}

_world = virtual_world(6)


class Pair(nn.Module):
    """Two layers, of which the second one's result is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Draw, last: Draw) -> Tensor:
        return last(self.down(hidden(torch.relu(self.up(x)))))


@cg.actor
class Net(nn.Module):
    """Two pairs of layers, which draw something before, inside and behind each of them."""

    def __init__(self, *draws: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.ModuleList(Pair() for _ in range(2))
        self.draws = draws
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (DRAWS_ONE_BY_ONE[draw] for draw in self.draws)
        x = first(x)
        for pair, hidden, last in zip(self.pairs, others[::2], others[1::2], strict=True):
            x = x + pair(x, hidden, last)
        return x

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def training(net: Any) -> Any:
    """Two executions of a compiled step, whose numbers differ."""

    def step(x: Tensor) -> Any:
        y = net.forward(x)
        cg.backward((y * y).mean())
        net.update()
        return y

    return cg.trace(step).lower(torch.ones(6, 2, WIDTH)).compile(seed=5)


# Each of these has a draw behind an exchange, and another one in front of it or behind it.
@example(draws=("dropout", "dropout", "dropout", "dropout", "dropout"), on="tp")
@example(draws=("nothing", "nothing", "dropout", "dropout", "nothing"), on="tp")
@example(draws=("nothing", "two dropouts", "nothing", "nothing", "of columns"), on="both")
@example(draws=("rand like", "bernoulli", "a path", "uniform", "normal"), on="both")
@example(draws=("nothing", "dropout", "like columns", "whole features", "integers"), on="stored")
@example(draws=("dropout", "nothing", "written", "nothing", "all dropped"), on="tp")
@examples(6, shrinks=True)
@given(draws=st.tuples(*[st.sampled_from(sorted(DRAWS))] * 5), on=st.sampled_from(sorted(MESHES)))
def test_groups_draw_what_one_rank_draws(draws: tuple[str, ...], on: str) -> None:
    assert_alike(draws, on)


def assert_alike(draws: tuple[str, ...], on: str) -> None:
    """A net on a mesh gives and becomes what it does on one rank, within two executions."""
    where = dict(MESHES[on])
    alone = Net.on(0)(*draws)  # type: ignore[attr-defined]
    group = Net.on(cg.mesh(**where.pop("mesh")), plan=PLAN, **where)(*draws)  # type: ignore[attr-defined]
    one, many = training(alone), training(group)
    for seed in range(2):
        x = torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert_close(many(x), one(x), False, f"execution {seed}")
    expected = alone.local.state_dict()
    for rank, instance in group.instances.items():
        for path, tensor in instance.state_dict().items():
            mine = cut_out(expected[path], region_of(group, path, rank))
            assert_close(tensor, mine, False, f"{path} on rank {rank}")


def test_draws_that_depend_on_what_is_exchanged_stand_alone() -> None:
    """One key seeds all draws of a call, so a second part would draw other numbers."""
    assert_alike(("nothing", "nothing", COINS, "dropout", "nothing"), "tp")
    with pytest.raises(cg.TraceError, match="draws random numbers behind an exchange") as error:
        assert_alike(("dropout", "nothing", COINS, "nothing", "nothing"), "tp")
    assert "test_random_numbers.py" in str(error.value)
