"""Proposed tokens: whatever is proposed, requests draw what they draw without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.checks import check_draft
from examples.serve.engine import CgEngine, start
from examples.serve.gpt import GptConfig
from examples.serve.ngram import LENGTHS, NgramIndex
from examples.serve.opening import open_model
from examples.serve.requests import How, Request, Sampling
from examples.serve.sampling.draw import draw
from examples.serve.variants import VerifySize, all_sizes, first_sizes, later_sizes
from examples.serve.work import Decode, Proposals

from ..mpi.jobs import ROOT, needs_mpi, run
from .serve_models import FEW, generate, load_qwen2, save_qwen2, serving
from .serve_requests import Served, guesses, mixed_requests, nothing, serve
from .serve_work import Row, decode_of, prefill_of

sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))

import speculation

TOKENS = 3
"""Tokens that are proposed at a time."""
SPECULATING = replace(FEW, late=True, draft_tokens=TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models of one layer and of two."""
    paths = {layers: tmp_path_factory.mktemp(f"qwen2-{layers}") for layers in (1, 2)}
    for layers, path in paths.items():
        save_qwen2(path, layers)
    return paths


@pytest.fixture(scope="module")
def engine(folders: dict[int, Path]) -> Iterator[CgEngine]:
    """Two stages and two groups, which take proposals."""
    with serving(folders[2], 2, SPECULATING) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests(engine: CgEngine) -> list[Request]:
    return mixed_requests(12, 1, engine.limits)


@pytest.fixture(scope="module")
def plain(engine: CgEngine, requests: list[Request]) -> Served:
    """What the requests draw by plain decode steps."""
    served = serve(engine, requests, nothing)
    assert served.speculation.drafts == 0
    return served


def is_greedy(request: Request) -> bool:
    return not request.sampling.temperature and request.sampling.adjustments is None


def same(served: Served, plain: Served) -> None:
    """Check that tokens, scores and ends are those of requests without proposals."""
    assert served.tokens == plain.tokens
    assert served.reasons == plain.reasons
    for id_, scores in plain.scores.items():
        assert len(served.scores[id_]) == len(scores)
        for mine, wanted in zip(served.scores[id_], scores, strict=True):
            assert mine.drawn == pytest.approx(wanted.drawn, abs=1e-4)
            values = [value for _, value in wanted.likeliest]
            assert [value for _, value in mine.likeliest] == pytest.approx(values, abs=1e-4)


def test_plain_steps_draw_what_generate_does(
    plain: Served, requests: list[Request], folders: dict[int, Path]
) -> None:
    model = load_qwen2(folders[2])
    greedy = [each for each in requests if is_greedy(each)]
    assert len(greedy) > 2
    for each in greedy:
        assert plain.tokens[each.id] == generate(model, each.prompt, each.max_tokens)
    asking = [each for each in requests if each.sampling.logprobs is not None]
    assert {each.sampling.temperature > 0 for each in asking} == {False, True}
    assert all(plain.scores[each.id] for each in asking)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_any_proposals_change_no_token(
    share: float, engine: CgEngine, requests: list[Request], plain: Served
) -> None:
    """Rows with proposals beside rows without, of any sampling, with blocks that run out.

    Nothing is proposed for requests with penalties.
    """
    adjusted = {each.id for each in requests if each.sampling.adjustments is not None}
    assert len(adjusted) > 1
    vocabulary = engine.limits.vocabulary
    for seed in range(2):
        served = serve(engine, requests, guesses(plain.tokens, share, vocabulary, seed))
        same(served, plain)
        counts = served.speculation
        assert counts.draft_tokens > 20
        if share == 1:
            assert counts.accepted_tokens == counts.draft_tokens
            assert served.steps < 0.8 * plain.steps
        else:
            assert counts.accepted_tokens < counts.draft_tokens
            assert (counts.accepted_tokens > 10) == (share > 0)


def test_texts_end_in_the_middle_of_proposals(
    engine: CgEngine, requests: list[Request], plain: Served
) -> None:
    """By tokens that end a text, of which some are behind the first."""
    limits = replace(engine.limits, eos=tuple(range(0, 64, 9)))
    free = [replace(each, ignore_eos=each.id % 5 == 0) for each in requests]
    proposes = guesses(plain.tokens, 1.0, limits.vocabulary)
    served, wanted = (serve(engine, free, each, limits) for each in (proposes, nothing))
    same(served, wanted)
    assert set(served.reasons.values()) == {"stop", "length"}
    ended = [id_ for id_, reason in served.reasons.items() if reason == "stop"]
    for id_ in ended:
        drawn, kept = plain.tokens[id_], len(served.tokens[id_])
        assert drawn[kept] in limits.eos
        assert not set(drawn[:kept]) & set(limits.eos)


def test_a_text_proposes_its_own_continuation(engine: CgEngine, folders: dict[int, Path]) -> None:
    """Greedy texts of small models repeat themselves."""
    requests = [Request(id_, (5 + id_, 9, 5 + id_, 9), 30) for id_ in range(4)]
    served = serve(engine, requests)
    model = load_qwen2(folders[2])
    for each in requests:
        assert served.tokens[each.id] == generate(model, each.prompt, 30)
    assert served.speculation.accepted_tokens > 10
    assert served.speculation.accepted_tokens <= served.speculation.draft_tokens


def test_rejected_tokens_leave_no_trace(engine: CgEngine, folders: dict[int, Path]) -> None:
    """A step after one whose proposals were wrong sees the text alone; so does another row."""
    model, prompt = load_qwen2(folders[2]), tuple(range(20, 29))
    right = generate(model, prompt, 4)
    (first,) = engine.submit(prefill_of(prompt, 0, (1, 2, 3), True, Sampling())).result()
    assert first == right[0]
    wrong = [(right[1] + 1) % 64, 1, 2]
    assert verified(engine, first, 9, (1, 2, 3), prompt[-1], wrong) == [right[1]]
    assert verified(engine, right[1], 10, (1, 2, 3), first, [right[2], 0]) == right[2:4]
    last = decode_of(0, (Row(right[3], 12, 0, (1, 2, 3), Sampling()),))
    assert engine.submit(last).result() == generate(model, prompt, 5)[4:]


def verified(
    engine: CgEngine,
    token: int,
    position: int,
    blocks: tuple[int, ...],
    before: int,
    proposed: list[int],
) -> list[int]:
    """The tokens of a row with proposals."""
    work = proposing(Row(token, position, 0, blocks, Sampling()), proposed, before)
    result = engine.submit(work)
    tokens = result.result()
    assert result.counts() == [len(tokens)]
    return tokens


def proposing(row: Row, proposed: list[int], before: int = 0, count: int | None = None) -> Decode:
    tokens = np.zeros((1, TOKENS), np.int64)
    tokens[0, : len(proposed)] = proposed
    counts = np.array([len(proposed) if count is None else count])
    proposals = Proposals(tokens, counts, np.array([before]))
    return replace(decode_of(0, (row,)), proposals=proposals)


ROW = Row(1, 7, 0, (1, 2), Sampling())


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (proposing(ROW._replace(token=-1), [1]), "a token is -1"),
        (proposing(ROW, [64]), "a proposal is 64"),
        (proposing(ROW, [1], 64), "a token is 64"),
        (proposing(ROW, [1], count=4), "a number of proposals is 4"),
        (proposing(ROW, [1], count=-1), "a number of proposals is -1"),
        (proposing(ROW._replace(blocks=(1,)), [1]), "1 blocks, and 2 are needed"),
        (proposing(ROW._replace(blocks=(1, 0)), [1]), "a block is 0"),
        (proposing(Row(1, 62, 0, tuple(range(1, 10)), Sampling()), [1, 2]), "a position is 64"),
    ],
)
def test_proposals_outside_of_the_limits_are_refused(
    work: Decode, said: str, engine: CgEngine
) -> None:
    with pytest.raises(ValueError, match=said):
        engine.submit(work)


# -- a draft -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_draft_changes_no_token(
    layers: int,
    folders: dict[int, Path],
    engine: CgEngine,
    requests: list[Request],
    plain: Served,
) -> None:
    """With weights of its own; and with those of the model, of which it then proposes all tokens.

    The latter is for --slow, as the next test has it. Both in blocks that run out: requests are
    computed again, and share what others have computed.
    """
    options = replace(SPECULATING, draft=folders[layers])
    with serving(folders[2], 2, options) as drafting:
        for _ in range(2):  # the second time, prompts are in the cache
            served = serve(drafting, requests)
            same(served, plain)
    counts = served.speculation
    if layers == 2:
        assert counts.accepted_tokens == counts.draft_tokens > 20
        assert served.steps < 0.8 * plain.steps
    else:
        assert 0 < counts.accepted_tokens < counts.draft_tokens


def test_a_draft_of_a_stage_that_is_cut_over_ranks(folders: dict[int, Path]) -> None:
    """The draft lies on the first of its ranks."""
    options = replace(SPECULATING, groups=1, tp=2, draft=folders[1])
    with serving(folders[1], 2, options) as engine:
        requests = [each for each in mixed_requests(9, 2, engine.limits) if each.id % 4 != 3]
        served = serve(engine, requests)
        model = load_qwen2(folders[1])
        for each in requests:
            if is_greedy(each):
                assert served.tokens[each.id] == generate(model, each.prompt, each.max_tokens)
    counts = served.speculation
    assert counts.accepted_tokens == counts.draft_tokens > 20


def test_a_draft_that_cannot_propose() -> None:
    model = open_model(GptConfig(layers=2, context=64))
    check_draft(open_model(GptConfig(layers=1, context=64)), model, 64)
    with pytest.raises(ValueError, match="the draft has 100 tokens and the model 256"):
        check_draft(open_model(GptConfig(layers=1, vocabulary=100)), model, 64)
    with pytest.raises(ValueError, match="the draft takes 32 tokens, and sequences have up to 64"):
        check_draft(open_model(GptConfig(layers=1, context=32)), model, 64)
    options = replace(FEW, draft=GptConfig(layers=1, context=64))
    with use_world(VirtualWorld(1)), pytest.raises(ValueError, match="a draft of 0 tokens"):
        start(model, options)


# -- variants ----------------------------------------------------------------------------------


def test_variants_that_verify(engine: CgEngine) -> None:
    """One comes first; they hold no plain steps, and plain steps hold none of theirs."""
    limits, options = engine.limits, replace(SPECULATING, batches=(2, 4), widths=None)
    verifying = VerifySize(4, 8, How.DRAWN, TOKENS + 1)
    assert verifying.holds(VerifySize(2, 8, How.GREEDY, TOKENS + 1))
    assert not verifying.holds(VerifySize(2, 8, How.DRAWN | How.SCORED, TOKENS + 1))
    assert not verifying.holds(VerifySize(2, 8, How.GREEDY, TOKENS))
    of = [size for size in first_sizes(limits, options) if isinstance(size, VerifySize)]
    assert of == [VerifySize(4, 2, How.DRAWN, TOKENS + 1)]
    sizes = [size for size in all_sizes(limits, options) if isinstance(size, VerifySize)]
    assert len(sizes) == len(set(sizes)) == 9
    later = [size for size in later_sizes(limits, options) if isinstance(size, VerifySize)]
    assert {(size.width, size.how) for size in later} == {(2, How.GREEDY)}
    without = replace(limits, draft_tokens=0)
    for sizes_of in (first_sizes, all_sizes, later_sizes):
        assert not any(isinstance(size, VerifySize) for size in sizes_of(without, options))


# -- n-grams -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.data())
def test_proposals_are_what_has_followed_the_longest_ngram(
    text: list[int], most: int, data: st.DataObject
) -> None:
    """As a search through the whole text finds it, in however many steps the text has come."""
    index = NgramIndex()
    tokens = np.array(text, np.uint32)
    for end in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))):
        index.propose(tokens[:end], most)
    assert index.propose(tokens, most) == searched(text, most)


def searched(text: list[int], most: int) -> list[int]:
    for length in LENGTHS:
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[len(text) - length :]:
                whole = list(text)
                for step in range(most):  # which may read what it has written
                    whole.append(whole[place + step])
                return whole[len(text) :]
    return []


# -- distributions -----------------------------------------------------------------------------

SEEDS, WORDS = 20_000, 8


def drawn(logits: Tensor, position: int = 5) -> Tensor:
    """A token for each of many seeds."""
    rows = torch.full((SEEDS,), position)
    ones = torch.ones(SEEDS)
    wide = logits.expand(SEEDS, -1)
    return draw(wide, rows, torch.arange(SEEDS), ones, torch.zeros_like(rows), ones)


def chi_square(tokens: Tensor, shares: Tensor) -> float:
    """The statistic over what is expected of it, in its standard deviations."""
    wanted = shares * len(tokens)
    assert float(wanted[wanted > 0].min()) > 5
    counts = torch.bincount(tokens, minlength=len(shares))
    assert not counts[wanted == 0].any()
    statistic = ((counts - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
    freedom = int((wanted > 0).sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("word", range(3))
def test_a_proposal_is_accepted_as_speculative_sampling_says(word: int) -> None:
    """With q at one token: with probability p of it, else a token of the rest of p.

    A proposal is accepted if it is the token that is drawn.
    """
    generator = torch.Generator().manual_seed(word)
    logits = torch.randn(WORDS, generator=generator)
    p = logits.softmax(-1)
    tokens = drawn(logits)
    assert abs(chi_square(tokens, p)) < 3
    accepted = tokens == word
    spread = float((p[word] * (1 - p[word]) / SEEDS) ** 0.5)
    assert abs(float(accepted.float().mean() - p[word])) < 3 * spread
    rest = p.clone()
    rest[word] = 0
    assert abs(chi_square(tokens[~accepted], rest / rest.sum())) < 3


def test_a_draft_that_draws_with_the_same_noise() -> None:
    """Tokens are p's, and proposals q's; they agree as often as two draws with one noise do."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(WORDS, generator=generator)
    other = logits + 0.7 * torch.randn(WORDS, generator=generator)
    p, q = logits.softmax(-1), other.softmax(-1)
    tokens, proposals = drawn(logits), drawn(other)
    assert abs(chi_square(tokens, p)) < 3
    assert abs(chi_square(proposals, q)) < 3
    agreeing = float((tokens == proposals).float().mean())
    ratios = torch.maximum(p[:, None] / p, q[:, None] / q)
    wanted = float((1 / ratios.sum(0)).sum())
    assert agreeing == pytest.approx(wanted, abs=3 * 0.5 / SEEDS**0.5)
    variation = float((p - q).abs().sum() / 2)
    assert (1 - variation) / (1 + variation) <= wanted <= 1 - variation
    # Elsewhere the noise is another.
    elsewhere = float((drawn(other, 6) == tokens).float().mean())
    assert elsewhere == pytest.approx(float((p * q).sum()), abs=3 * 0.5 / SEEDS**0.5)


def test_texts_have_the_distribution_of_the_model(
    engine: CgEngine, folders: dict[int, Path]
) -> None:
    """Three tokens of many requests, the second and the third with proposals."""
    prompt, count, words = (3, 14, 15, 9), 600, 3
    sampling = Sampling(0.8, top_k=words)
    requests = [
        Request(id_, prompt, 3, replace(sampling, seed=id_), salt=b"x") for id_ in range(count)
    ]
    model, kept = load_qwen2(folders[2]), torch.zeros(0)
    texts, shares = torch.tensor([prompt]), torch.ones(1)
    for _ in range(3):
        with torch.no_grad():
            kept = (model(texts).logits[:, -1] / 0.8).topk(words)
        shares = (shares[:, None] * kept.values.softmax(-1)).flatten()
        ahead = texts.repeat_interleave(words, 0)
        texts = torch.cat([ahead, kept.indices.flatten()[:, None]], 1)
    names = {tuple(text): number for number, text in enumerate(texts[:, len(prompt) :].tolist())}
    likely = {text[: len(prompt) + n]: text for n in (1, 2) for text in map(tuple, texts.tolist())}

    def proposes(request: Request) -> Any:
        return lambda known, most: list(likely[tuple(known.tolist())][len(known) :][:most])

    served = serve(engine, requests, proposes)
    counts = served.speculation
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    numbers = torch.tensor([names[tuple(tokens)] for tokens in served.tokens.values()])
    order = shares.argsort(descending=True)
    often = int((shares * count > 8).sum())
    bins = torch.full((len(shares),), often)  # one for all that are rare
    bins[order[:often]] = torch.arange(often)
    wanted = torch.zeros(often + 1).index_add_(0, bins, shares)
    assert abs(chi_square(bins[numbers], wanted)) < 3


# -- the benchmark -----------------------------------------------------------------------------


def test_the_benchmark_counts_steps() -> None:
    """With the share of right proposals that is asked for; it compares tokens itself."""
    args = argparse.Namespace(
        right=0.6, draft_tokens=4, tokens=200, rounds=2, layers=2, hidden=128, count=True
    )
    options, config = speculation.options(4), speculation.config(args.layers, args.hidden)
    with serving(config, 2, options) as engine:
        report = speculation.measure(engine, args)
    assert report["plain_steps"] == 199
    assert report["expected_tokens_per_step"] == pytest.approx(2.3056, abs=1e-4)
    assert report["tokens_per_step"] == pytest.approx(2.3056, rel=0.2)
    assert report["steps"] < 110


# -- ranks -------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize("draft", [pytest.param("ngram", marks=pytest.mark.slow), "model"])
def test_on_mpi_ranks_with_devices(ranks: int, draft: str, folders: dict[int, Path]) -> None:
    """All graphs are whole on fake devices, also those that verify, with a draft in them."""
    job = ["tests.examples.speculation_job", str(folders[2])]
    job += [str(folders[1])] if draft == "model" else []
    program = ["-m", "tests.mpi.device_job", *job]
    ended = run(ranks, program, folder=ROOT, seconds=280, warm=True)
    assert ended.code == 0, ended.output
    assert "rank 1 has served" in ended.output
    assert "0 differences" in ended.output, ended.output
    assert "3 of 3 whole, 3 replayed" in ended.output, ended.output
