"""Layers whose statistics are of the whole batch, and what they write to their buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cg.tracer.graph.layouts.cases import LayoutError

from .joint_tools import compare
from .op_cases import ATEN, ints
from .simulation import check, layout, mesh

GRID = mesh(dp=2, tp=2)
STATISTICS = (ints(4), ints(4).abs() + 1)


def running(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
    """The output of a batch norm in training, and the statistics that it has updated."""
    made = ATEN.native_batch_norm(x, None, None, mean, variance, True, 0.25, 1e-5)
    return made[0], mean * 1, variance * 1


@pytest.mark.parametrize(
    ("rows", "statistics", "reductions"),
    [("dp,-,-", "-", 2), ("dp.tp,-,-", "-", 2), ("dp,tp,-", "tp", 2), ("-,-,tp", "-", 2)],
)
def test_a_batch_norm_is_one_of_the_whole_batch(
    rows: str, statistics: str, reductions: int
) -> None:
    given = [layout(rows), layout(statistics), layout(statistics)]
    run = check(running, [ints(6, 4, 3), *STATISTICS], given, GRID, tolerance=1e-12)
    assert [change.value for change in run.changes].count("reduce") == reductions


def test_statistics_that_a_batch_norm_updates_are_cut_as_its_channels() -> None:
    given = [layout("dp,tp,-"), layout("-"), layout("-")]
    message = r"channels are cut along tp, and %mean_1, which it updates, is not laid out like that"
    with pytest.raises(LayoutError, match=message) as caught:
        check(running, [ints(6, 4, 3), *STATISTICS], given, GRID)
    assert (
        caught.value.remedy == "give running_mean and running_var the cut of the channels in "
        "the plan"
    )


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.groups, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.max_pool2d(self.norm(self.stem(x)).relu(), 2)
        made = self.groups(made).mean((2, 3))
        return nn.functional.mse_loss(self.head(made), target)


@pytest.mark.parametrize("rows", [4, 3])
def test_a_convolutional_model_of_a_cut_batch(rows: int) -> None:
    args = [ints(rows, 3, 6, 6), ints(rows, 3)]
    run = compare(Convolutional(), "forward", {}, GRID, args, ["dp,-,-,-", "dp,-"], tolerance=1e-9)
    # The loss; mean and variance; and in the backward the two sums of the norm.
    assert [change.value for change in run.changes].count("reduce") == 5


class OfMatrices(nn.Module):
    """Solves with a matrix for each row and head, as layers with a delta rule do."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(ints(2, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lower = torch.linalg.solve_triangular(
            x, self.columns, upper=False, left=True, unitriangular=True
        )
        full = x + 9 * torch.eye(4, dtype=x.dtype)
        solved = torch.linalg.solve(full, lower) + full.inverse() @ lower
        return solved.square().sum() + full.logdet().sum()


@pytest.mark.parametrize("matrices", ["dp,-,-,-", "-,tp,-,-", "dp,tp,-,-"])
def test_stacks_of_matrices_are_solved_in_pieces(matrices: str) -> None:
    plan = {"columns": "tp,-,-"} if "tp" in matrices else {}
    compare(OfMatrices(), "forward", plan, GRID, [ints(3, 2, 4, 4)], [matrices], tolerance=1e-9)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], batch_first: bool, **options: int) -> None:
        super().__init__()
        self.cells = kind(5, 4, batch_first=batch_first, **options).double()

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        hidden, last = self.cells(x, states or None)
        return hidden.sum() + sum(state.square().sum() for state in last)


@pytest.mark.grid(1)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_a_cut_batch(
    kind: type[nn.Module], rows: int, batch_first: bool
) -> None:
    actor = Recurrent(kind, batch_first, num_layers=2, bidirectional=True)
    shape, cut = ((rows, 2, 5), "dp,-,-") if batch_first else ((2, rows, 5), "-,dp,-")
    run = compare(actor, "forward", {}, GRID, [ints(*shape)], [cut], tolerance=1e-9)
    # The sum of the loss alone: gradients of weights stay summands, as those of products.
    assert {change.value for change in run.changes} <= {"slice", "reduce"}


def test_projected_recurrent_layers_from_states_of_a_cut_batch() -> None:
    args = [ints(2, 4, 5), ints(1, 4, 3), ints(1, 4, 4)]
    actor = Recurrent(nn.LSTM, False, proj_size=3)
    run = compare(actor, "forward", {}, GRID, args, ["-,dp,-"] * 3, tolerance=1e-9)
    assert {change.value for change in run.changes} <= {"slice", "reduce"}


class Stepwise(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(5, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for at_step in x.unbind(1):
            state = self.cell(at_step, state)
        assert state is not None
        return (state[0] if isinstance(state, tuple) else state).square().sum()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_of_a_cut_batch(kind: type[nn.Module]) -> None:
    run = compare(Stepwise(kind), "forward", {}, GRID, [ints(4, 3, 5)], ["dp,-,-"], tolerance=1e-9)
    assert {change.value for change in run.changes} <= {"slice", "reduce"}
