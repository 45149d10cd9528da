"""Sampling in the graph: what may be drawn, how often it is, and that rows are on their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from examples.serve.requests import Adjustments, Sampling
from examples.serve.sampling.adjust import unpack
from examples.serve.sampling.draw import _threshold, _threshold_on_host, draw, greedy, gumbel
from examples.serve.sampling.records import Records, pack, write
from examples.serve.work import Chunk, Record

from .serve_driver import random_adjustments
from .serve_oracle import adjusted


def drawn(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
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
        None if min_p is None else torch.full((rows,), min_p),
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


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_hosts_leave_out_what_devices_do(spread: float) -> None:
    """With equal logits, and tokens that nothing draws, in rows of all kinds."""
    generator = torch.Generator().manual_seed(0)
    scaled = spread * torch.randn(48, 3000, generator=generator)
    scaled[:, ::7] = -torch.inf
    top_k = torch.tensor([0, 1, 20, 2571, 3000, 9999]).repeat(8)
    top_p = torch.tensor([0.0, 0.05, 0.5, 0.9, 0.999, 0.2, 1.0, 1.0]).repeat_interleave(6)
    right = _threshold(scaled, top_k, top_p)
    threshold = _threshold_on_host(scaled, top_k, top_p)
    kept, wanted = (scaled >= each[:, None] for each in (threshold, right))
    kept &= scaled > -torch.inf
    takes_all = (top_p == 1) & ((top_k == 0) | (top_k >= 3000))
    assert torch.equal(kept[takes_all], (scaled > -torch.inf)[takes_all])
    # Sums of other orders may differ in a last bit, and by a token.
    assert ((kept != wanted).sum(-1)[~takes_all] <= (1 if spread else 3000)).all()
    if spread:
        assert (kept == wanted)[~takes_all].all(-1).float().mean() > 0.9


def test_noise_is_finite_and_differs_in_all_that_it_is_made_of() -> None:
    seeds = torch.tensor([0, 1, 1 << 32, 1 << 62, 0])
    noise = gumbel(seeds, torch.tensor([0, 0, 0, 0, 1]), 4096)
    assert noise.isfinite().all()
    related = torch.corrcoef(noise) - torch.eye(5)
    assert related.abs().max() < 0.08
    assert abs(noise.mean() - 0.5772) < 0.05  # Euler's constant is the mean of Gumbel's


def recorded(requests: int, vocabulary: int) -> Records:
    """Records in memory, all zeros."""
    records = Records(requests, vocabulary).to_empty(device="cpu")
    for buffer in records.buffers():
        buffer.zero_()
    return records


def bring(records: Records, brought: list[tuple[Record, Adjustments] | None], room: int) -> Tensor:
    """Load records, with room for so many tokens; their places."""
    rows = np.zeros((len(brought), records.layout.columns(room)), np.int64)
    for row, pair in zip(rows, brought, strict=True):
        if pair is not None:
            sampling = Sampling(adjustments=pair[1])
            write(row, Chunk((), 0, (), True, sampling, pair[0]), records.layout)
    return records.load(torch.from_numpy(rows))


def walk(seed: int, vocabulary: int, steps: int) -> None:
    """Draw for several requests with records of their own, and compare each step."""
    source = random.Random(seed)
    records = recorded(9, vocabulary)
    places = source.sample(range(1, 10), 4)
    changes = [random_adjustments(source, vocabulary) for _ in places]
    prompts = [source.choices(range(vocabulary), k=source.randint(1, 30)) for _ in places]
    outs = [source.choices(range(vocabulary), k=source.randint(0, 20)) for _ in places]
    pairs = [
        (Record(place, [*prompt, *out], len(prompt)), change)
        for place, prompt, out, change in zip(places, prompts, outs, changes, strict=True)
    ]
    at = bring(records, [*pairs, None], 60)
    assert at.tolist() == [*places, 0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        logits = 3 * torch.randn(5, vocabulary, generator=generator)
        lengths = [len(prompt) + len(out) for prompt, out in zip(prompts, outs, strict=True)]
        got, min_p = records.adjust(logits, at, torch.tensor([*lengths, 7]))
        for row, (prompt, out, change) in enumerate(zip(prompts, outs, changes, strict=True)):
            torch.testing.assert_close(got[row], adjusted(logits[row], prompt, out, change))
            assert min_p[row] == pytest.approx(change.min_p)
        assert torch.equal(got[4], logits[4])
        drawn = got.argmax(-1)
        records.count(at, drawn)
        for out, token in zip(outs, drawn.tolist(), strict=False):
            out.append(token)
    assert not records.settings[0].any()
    others = [place for place in range(1, 10) if place not in places]
    assert not records.counts[others].any()


@pytest.mark.parametrize("seed", range(40))
def test_adjusted_logits_are_those_of_transformers(seed: int) -> None:
    """Of several requests side by side, some of which go on after a preemption."""
    walk(seed, vocabulary=[31, 32, 33, 100][seed % 4], steps=12)


def test_a_record_begins_anew_with_its_next_request() -> None:
    records = recorded(1, 10)
    first = Adjustments(banned=(1,), presence=1.0, bad_words=((2, 3),), biases=((4, 1.0),))
    bring(records, [(Record(1, [1, 2, 2, 2], 1), first)], 4)
    place = bring(records, [(Record(1, [5, 6], 1), Adjustments(frequency=1.0))], 4)
    logits, _ = records.adjust(torch.zeros(1, 10), place, torch.tensor([2]))
    assert logits[0].tolist() == [0, 0, 0, 0, 0, 0, -1, 0, 0, 0]


def test_frequencies_with_min_p_are_those_of_transformers() -> None:
    """Which excludes by min_p behind top_k and top_p; so the shares are compared without these."""
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(4))
    wanted = MinPLogitsWarper(0.2)(None, TemperatureLogitsWarper(1.5)(None, logits.clone()))
    shares, count = wanted.softmax(-1)[0], 20000
    got = drawn(logits.expand(count, -1), temperature=1.5, min_p=0.2)
    found = torch.bincount(got, minlength=12) / count
    assert 0 < (shares == 0).sum() < 11
    assert (found[shares == 0] == 0).all()
    assert (found - shares).abs().max() < 4 * (0.25 / count) ** 0.5


def test_min_p_comes_before_top_p() -> None:
    """As in vLLM: top_p adds up shares of what min_p has left."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(2000, -1)
    assert set(drawn(logits, min_p=0.5, top_p=0.62).tolist()) == {0}
    assert set(drawn(logits, top_p=0.62).tolist()) == {0, 1}


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100])
def test_packed_bits(count: int) -> None:
    bits = np.random.default_rng(count).random(-(-count // 32) * 32) < 0.5
    words = torch.from_numpy(pack(bits))[None]
    assert unpack(words, count)[0].tolist() == bits[:count].tolist()
