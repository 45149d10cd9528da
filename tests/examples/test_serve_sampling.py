"""Sampling in the graph: what may be drawn, how often it is, and that rows are on their own."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from examples.serve.sampling import draw, greedy, gumbel


def drawn(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw from each row, all with the same parameters and each at a position of its own."""
    rows = len(logits)
    return draw(
        logits,
        torch.arange(rows) if positions is None else positions,
        torch.full((rows,), 7) if seeds is None else seeds,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
    )


def test_without_temperature_it_is_greedy() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn(logits, temperature=0.0, top_k=3, top_p=0.1), greedy(logits))
    assert torch.equal(drawn(logits, top_k=1), greedy(logits))
    assert torch.equal(drawn(logits, top_p=0.0), greedy(logits))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (0.9, 6, 0.7), (1.0, 3, 0.95)],
)
def test_frequencies_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    wanted = TemperatureLogitsWarper(temperature)(None, logits.clone())
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    shares = wanted.softmax(-1)[0]
    count = 20000
    got = drawn(logits.expand(count, -1), temperature=temperature, top_k=top_k, top_p=top_p)
    found = torch.bincount(got, minlength=12) / count
    assert (found[shares == 0] == 0).all()
    assert (found - shares).abs().max() < 4 * (0.25 / count) ** 0.5


def test_a_row_depends_on_no_other_row() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(16, 50, generator=generator)
    seeds = torch.randint(2**62, (16,), generator=generator)
    positions = torch.randint(1000, (16,), generator=generator)
    together = drawn(logits, seeds=seeds, positions=positions, top_k=20, top_p=0.9)
    for row in range(16):
        one = slice(row, row + 1)
        alone = drawn(logits[one], seeds=seeds[one], positions=positions[one], top_k=20, top_p=0.9)
        assert alone == together[row]


def test_noise_is_finite_and_differs_in_all_that_it_is_made_of() -> None:
    seeds = torch.tensor([0, 1, 1 << 32, 1 << 62, 0])
    noise = gumbel(seeds, torch.tensor([0, 0, 0, 0, 1]), 4096)
    assert noise.isfinite().all()
    related = torch.corrcoef(noise) - torch.eye(5)
    assert related.abs().max() < 0.08
    assert abs(noise.mean() - 0.5772) < 0.05  # Euler's constant is the mean of Gumbel's
