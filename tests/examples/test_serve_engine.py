"""The engine of examples/serve: its tokens are those of the eager model, however they are asked."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.masking_utils import causal_mask_function

import cg
from cg.backends.fusion import fuse
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve import growing, projections
from examples.serve.attention import PagedCache, attend
from examples.serve.engine import CgEngine, start
from examples.serve.gpt import GptConfig
from examples.serve.model import split
from examples.serve.opening import open_model
from examples.serve.pages import Pages
from examples.serve.pools import Pool
from examples.serve.requests import Adjustments, How, Limits, Sampling, Scores
from examples.serve.settings import Options
from examples.serve.stage_graphs import cut, decode_step, make_stage
from examples.serve.variants import DecodeSize, PrefillSize, all_sizes, later_sizes, widths
from examples.serve.work import POSITION, TABLE, Chunk, Decode, Prefill, Record

from ..mpi.jobs import ROOT, needs_mpi, run
from ..sampling import scale
from .serve_driver import Driver, Habits, Request, differences, random_requests
from .serve_models import FEW, GREEDY, OPTIONS, generate, load_qwen2, logits_of, save_qwen2, serving
from .serve_work import Row, decode_of, prefill_of

sys.path.insert(0, str(ROOT / "examples"))

import checkpoints
import train_gpt


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models of one, two and three layers: each costs its time in each variant of an engine."""
    found = {}
    for layers in (1, 2, 3):
        found[layers] = tmp_path_factory.mktemp(f"qwen2-{layers}")
        save_qwen2(found[layers], layers)
    return found


@pytest.fixture(scope="module")
def folder(folders: dict[int, Path]) -> Path:
    """A model of which each of two stages has one layer."""
    return folders[2]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_qwen2(folder)


def greedy(count: int, seed: int, limits: Limits) -> list[Request]:
    """Random requests of 12 tokens that an engine without `draws` takes."""
    requests = random_requests(count, seed, limits)
    return [replace(each, sampling=Sampling(), most=12) for each in requests]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[CgEngine]:
    """On two ranks, with two groups."""
    with serving(folder, 2, OPTIONS) as made:
        yield made


@pytest.mark.parametrize("ranks", [1, 3])
def test_greedy_tokens_are_those_of_generate(ranks: int, folders: dict[int, Path]) -> None:
    """Three layers in one stage, and one in each of three."""
    with serving(folders[3], ranks, GREEDY) as engine:
        requests = greedy(6, ranks, engine.limits)
        Driver(engine, Habits(seed=ranks)).run(requests)
    model = load_qwen2(folders[3])
    for each in requests:
        assert each.out == generate(model, each.prompt, 12)


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for TorchInductor"
)
def test_fused_tokens_are_those_of_generate(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode step attention is loops, and the prompts' is torch's kernel.

    Some of the weights are packed, and some are transposed. By default only the variants that the
    requests ask for are compiled.
    """
    monkeypatch.setattr(projections, "SMALL", 32 * 64)
    options = replace(GREEDY, prompt_tokens=None, fuse="inductor", late=scale() == 1)
    with serving(folders[1], 1, options) as engine:
        first = next(s for s in engine.graphs.compiled if isinstance(s, DecodeSize))
        (graph,) = engine.graphs.compiled[first]
        # The actor has a number, which other tests of the process may have used.
        fused = {name.partition(".")[2]: why for name, why in graph.fused.items()}
        assert fused["decode"] == ""
        requests = greedy(6, 5, engine.limits)
        Driver(engine, Habits(seed=5, preempting=0.03)).run(requests)
    model = load_qwen2(folders[1])
    for each in requests:
        assert each.out == generate(model, each.prompt, 12)


def test_a_stage_that_is_cut_over_ranks(folders: dict[int, Path]) -> None:
    """Greedy, sampled and adjusted tokens; by default, of the variants that they ask for."""
    with serving(folders[1], 2, replace(FEW, groups=1, tp=2, late=scale() == 1)) as engine:
        assert engine.limits.groups == 1
        requests = random_requests(8, 11, engine.limits, share=0.4)
        Driver(engine, Habits(seed=11, preempting=0.03)).run(requests)
    assert differences(logits_of(load_qwen2(folders[1])), requests)[0] == 0


@pytest.mark.parametrize(
    ("ranks", "tp", "said"),
    [(3, 2, "3 ranks by 2"), (4, 4, "2 heads of keys"), (4, 1, "and 2 layers")],
)
def test_ranks_that_cannot_share_stages(ranks: int, tp: int, said: str, folder: Path) -> None:
    with use_world(VirtualWorld(ranks)), pytest.raises(ValueError, match=said):
        start(folder, replace(FEW, tp=tp))


def test_random_arrivals_preemptions_and_cancellations(engine: CgEngine, model: Any) -> None:
    requests = random_requests(40, 1, engine.limits)
    driver = Driver(engine, Habits(seed=1, preempting=0.05, cancelling=0.02))
    driver.run(requests)
    assert differences(logits_of(model), requests)[0] == 0
    assert driver.hits > 5
    assert driver.packed > 5
    assert driver.preempted > 5
    assert sum(each.is_cancelled for each in requests) > 0


def test_adjusted_logits_are_those_of_transformers(folder: Path, model: Any) -> None:
    """Beside requests without adjustments, with preemptions, in two stages and two groups."""
    with serving(folder, 2, replace(OPTIONS, late=True)) as engine:
        compiled = set(engine.graphs.compiled)
        requests = random_requests(40, 21, engine.limits, share=0.6)
        driver = Driver(engine, Habits(seed=21, preempting=0.08, cancelling=0.02))
        driver.run(requests)
        adjusting = [size for size in engine.graphs.compiled if How.ADJUSTED in size.how]
        assert not compiled.intersection(adjusting)
        assert {type(size) for size in adjusting} == {DecodeSize, PrefillSize}
        records = engine.graphs.stages[1].local.records
        assert not records.settings[0].any()
    assert differences(logits_of(model), requests)[0] == 0
    assert driver.preempted > 5
    assert driver.packed > 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_thousand_requests(ranks: int, folders: dict[int, Path]) -> None:
    with serving(folders[3], ranks, OPTIONS) as engine:
        requests = random_requests(2000, 100 + ranks, engine.limits)
        driver = Driver(engine, Habits(seed=ranks, preempting=0.03, cancelling=0.01))
        driver.run(requests)
    wrong, near = differences(logits_of(load_qwen2(folders[3])), requests)
    tokens = sum(len(each.out) for each in requests)
    print(f"{tokens} tokens, {near} near ties, {driver.hits} shared, {driver.preempted} preempted")
    assert wrong == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_every_bucket(engine: CgEngine, model: Any, sampled: bool) -> None:
    """Each number of rows at each width of tables, with prompts by the longest chunk."""
    limits = engine.limits
    size, largest = limits.block_size, widths(limits, OPTIONS)
    for count in range(1, limits.slots + 1):
        for width in largest:
            length = width * size - 2
            requests = [
                Request(
                    tuple((7 * row + 3 * i) % limits.vocabulary for i in range(length)),
                    2,
                    Sampling(0.8, seed=row) if sampled else Sampling(),
                )
                for row in range(count)
            ]
            per = 1 if count * width >= limits.blocks else 0
            blocks = [
                tuple(range(1 + (row * (1 - per)) * width, 1 + (row * (1 - per) + 1) * width))
                for row in range(count)
            ]
            if per:  # the pool holds one row of this length: all rows are that one
                requests = [replace(requests[0], out=[]) for _ in requests]
            rows = []
            for row, each in enumerate(requests):
                _prefill_all(engine, each, blocks[row])
                slot = limits.slots - 1 - row
                rows.append(Row(each.out[0], length, slot, blocks[row], each.sampling))
            tokens = engine.submit(decode_of(1, tuple(rows))).result()
            for each, token in zip(requests, tokens, strict=True):
                each.out.append(token)
            assert differences(logits_of(model), requests)[0] == 0


def _prefill_all(engine: CgEngine, request: Request, blocks: tuple[int, ...]) -> None:
    prompt, chunk = request.prompt, engine.limits.chunk
    for at in range(0, len(prompt), chunk):
        part = prompt[at : at + chunk]
        last = at + len(part) == len(prompt)
        result = engine.submit(prefill_of(part, at, blocks, last, request.sampling))
        request.out += result.result()


def test_tokens_depend_on_no_companion_chunk_slot_or_group(engine: CgEngine, model: Any) -> None:
    outs = []
    for chunk, companions, ragged in [(1, 3, False), (7, 8, False), (32, 1, False), (32, 8, True)]:
        requests = random_requests(10, 3, engine.limits)
        habits = Habits(chunk, 0.6, chunk, ragged, companions, preempting=0.05 * ragged)
        Driver(engine, habits).run(requests)
        outs.append([each.out for each in requests])
        assert differences(logits_of(model), requests) == (0, 0)
    assert outs[0] == outs[1] == outs[2] == outs[3]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5, seed=3)])
def test_log_probabilities_are_those_of_the_model(
    engine: CgEngine, model: Any, sampling: Sampling
) -> None:
    """Before temperature and top_k; they change no token, and cost a batch without them nothing."""
    prompt, blocks = tuple(range(3, 23)), ((1, 2, 3, 4), (5, 6, 7, 8))
    outs: list[list[int]] = []
    scores = []
    for asked in (sampling, replace(sampling, logprobs=3)):
        chunk = engine.submit(prefill_of(prompt, 0, blocks[0], True, asked))
        engine.submit(prefill_of(prompt[:9], 0, blocks[1], True, Sampling())).result()
        outs.append(chunk.result())
        scores += chunk.scores()
        for step in range(4):
            at, out = len(prompt) + step, outs[-1]
            # A companion that asks for none runs in the same batch.
            rows = (
                Row(out[-1], at, 0, blocks[0], asked),
                Row(7, 9, 1, blocks[1], Sampling()),
            )
            result = engine.submit(decode_of(0, rows))
            out.append(result.result()[0])
            scores += result.scores()[:1]
    assert outs[0] == outs[1]
    assert len(scores) == len(outs[1])  # and none of those that did not ask
    with torch.no_grad():
        logits = model(torch.tensor([(*prompt, *outs[1][:-1])])).logits[0, len(prompt) - 1 :]
    shares = logits.log_softmax(-1)
    for row, token, each in zip(shares, outs[1], scores, strict=True):
        assert each.drawn == pytest.approx(float(row[token]), abs=1e-4)
        wanted = row.topk(20)
        assert [value for _, value in each.likeliest] == pytest.approx(
            wanted.values.tolist(), abs=1e-4
        )
        assert [float(row[id_]) for id_, _ in each.likeliest] == pytest.approx(
            wanted.values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("logprobs", [None, 2])
def test_log_probabilities_of_a_prompt_are_those_of_the_model(
    engine: CgEngine, model: Any, logprobs: int | None
) -> None:
    """In chunks, on two stages; adjustments of what is drawn make no difference."""
    prompt, blocks, step = tuple(range(3, 23)), (4, 2, 7), engine.limits.scored
    sampling = Sampling(0.7, seed=5, logprobs=logprobs, adjustments=Adjustments(banned=(1, 2)))
    scores: list[Scores] = []
    for at in range(0, len(prompt), step):
        part, behind = prompt[at : at + step], (*prompt, 0)[at + 1 :][:step]
        last = at + len(part) == len(prompt)
        record = Record(1, prompt, len(prompt)) if last else None
        chunk = Chunk(part, at, blocks, last, sampling, record, behind)
        result = engine.submit(Prefill((chunk,)))
        assert len(result.result()) == last
        assert len(result.scores()) == (last and logprobs is not None)
        scores += result.prompt_scores()
    assert step < len(prompt) == len(scores)
    with torch.no_grad():
        shares = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, token, each in zip(shares, prompt[1:], scores, strict=False):
        assert each.drawn == pytest.approx(float(row[token]), abs=1e-4)
        assert each.rank == int((row > row[token]).sum()) + 1
        values = [value for _, value in each.likeliest]
        assert values == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
        assert values == pytest.approx([float(row[id_]) for id_, _ in each.likeliest], abs=1e-4)


def test_tokens_are_those_of_generate_while_variants_are_compiled(folders: dict[int, Path]) -> None:
    """With the first two, after each other one, and with all; two groups."""
    options = replace(GREEDY, groups=2, batches=(2, 4), chunks=(8, 32), widths=None, late=True)
    model, counts, requests = load_qwen2(folders[1]), [], []
    with serving(folders[1], 1, options) as engine:
        while engine.due(idle=True) or not counts:
            if counts:
                engine.improve()
            counts.append(len(engine.usable))
            new = greedy(3, len(counts), engine.limits)
            Driver(engine, Habits(seed=len(counts), preempting=0.05)).run(new)
            requests += new
        left = set(later_sizes(engine.limits, options)) - set(engine.graphs.compiled)
        assert not left
        assert not engine.due(idle=False)
    assert counts[0] == 2
    assert counts == sorted(counts)
    for each in requests:
        assert each.out == generate(model, each.prompt, 12)


def test_what_no_variant_holds_is_compiled_at_once(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, and a chunk that goes on; prompts together are served one by one."""
    monkeypatch.setattr(growing, "PRICE", 0.0)
    options = replace(OPTIONS, groups=1, late=True, first_chunk=32)
    with serving(folders[1], 1, options) as engine:
        first = set(engine.graphs.compiled)
        chunks = [Chunk((n, 7), 0, (n,), True, Sampling()) for n in (1, 2, 3)]
        alone = [engine.submit(Prefill((chunk,))).result() for chunk in chunks]
        together = engine.submit(Prefill(tuple(chunks)))
        assert [[token] for token in together.result()] == alone
        assert together.scores() == []
        assert set(engine.graphs.compiled) == first
        # A busy engine rests for nine times as long as it has compiled.
        assert engine.asked
        assert not engine.due(idle=False)
        engine.rest(0.0)
        assert engine.due(idle=False)
        scored = replace(chunks[0], sampling=Sampling(logprobs=2))
        result = engine.submit(Prefill((scored,)))
        assert result.result() == alone[0]
        assert len(result.scores()) == 1
        engine.submit(prefill_of((1,), 8, (4, 5), True, Sampling())).result()
        (scores, goes_on) = set(engine.graphs.compiled) - first
        assert {scores.how, goes_on.how} == {How.DRAWN | How.SCORED, How.DRAWN}
        assert not engine.due(idle=False)
        assert engine.due(idle=True)
        asked = max(engine.asked, key=engine.asked.__getitem__)
        while asked not in engine.usable:
            engine.improve()
        assert asked not in engine.asked


BLOCKS = (1, 2, 3)


def test_steps_are_taken_while_kernels_are_made(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler in a thread has put its own in place of `Module.__call__` all the while."""
    may_end, has_begun, is_ready = (threading.Event() for _ in range(3))

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        def hold(x: torch.Tensor) -> torch.Tensor:
            has_begun.set()
            assert may_end.wait(300)
            return x + 1

        if threading.current_thread() is not threading.main_thread():
            make_fx(hold)(torch.zeros(1))
        return lambda values: module(*values)

    monkeypatch.setitem(fuse.FUSERS, "held", lambda: compiler)
    monkeypatch.setattr(growing, "SLICE", 0.0)
    options = replace(GREEDY, batches=(2, 4), chunks=(8, 32), late=True, fuse="held")

    def drawn(count: int) -> list[int]:
        result = engine.submit(prefill_of((1, 7), 0, BLOCKS, True, Sampling())).result()
        for position in range(2, 1 + count):
            row = Row(result[-1], position, 0, BLOCKS, Sampling())
            result += engine.submit(decode_of(0, [row])).result()
        return result

    with serving(folders[1], 1, options) as engine:
        engine.when_ready(is_ready.set)
        first = engine.usable
        engine.improve()  # a slice that traces a variant
        assert has_begun.wait(300)
        assert not engine.due(idle=True)
        found = [drawn(8)]
        assert (engine.usable, is_ready.is_set()) == (first, False)
        may_end.set()
        assert is_ready.wait(300)
        assert engine.due(idle=True)
        engine.improve()  # one that binds it
        assert engine.usable == first
        while engine.usable == first:
            engine.improve()  # that run it on padding
        found.append(drawn(8))
    assert found == [generate(load_qwen2(folders[1]), (1, 7), 8)] * 2


def test_guards_in_the_graph(folder: Path, model: Any) -> None:
    """They change no token; what the driver would refuse fails where bounds are checked."""
    options = replace(GREEDY, clamp=True, debug_bounds=True)
    with serving(folder, 2, options) as engine:
        requests = greedy(4, 3, engine.limits)
        Driver(engine, Habits(seed=3)).run(requests)
        assert differences(logits_of(model), requests) == (0, 0)
        size, (graph,) = next(iter(engine.graphs.compiled.items()))
        assert isinstance(size, DecodeSize)
        batch, *rest = size.example(engine.limits, 0)
        for column, number in ((TABLE, 20), (TABLE, -1), (POSITION, -1)):
            wrong = batch.clone()
            wrong[0, column] = number
            with pytest.raises(RuntimeError, match="is out of bounds"):
                graph.execute(wrong, *rest).result()
        assert graph.execute(batch, *rest).result().shape == (4,)


def test_two_tables_may_share_blocks(engine: CgEngine, model: Any) -> None:
    stem = tuple(range(16))
    first, second = Request((*stem, 40, 41), 2), Request((*stem, 50), 2)
    first.out += engine.submit(prefill_of(first.prompt, 0, (5, 6, 7), True, Sampling())).result()
    second.out += engine.submit(prefill_of((50,), 16, (5, 6, 8), True, Sampling())).result()
    rows = (
        Row(first.out[0], 18, 0, (5, 6, 7), Sampling()),
        Row(second.out[0], 17, 1, (5, 6, 8), Sampling()),
    )
    for each, token in zip(
        (first, second), engine.submit(decode_of(0, rows)).result(), strict=True
    ):
        each.out.append(token)
    assert differences(logits_of(model), [first, second]) == (0, 0)


@pytest.mark.parametrize("sampled", [False, True])
def test_packed_prompts_draw_what_they_draw_alone(
    sampled: bool, engine: CgEngine, model: Any
) -> None:
    """One is a token long, and one has a chunk more, of one token."""
    warm = Sampling(0.8, 5, 0.9, 1 << 40) if sampled else Sampling()
    long = tuple(range(33))
    requests = [Request((40,), 2, warm), Request(long, 2), Request(tuple(range(50, 59)), 2, warm)]
    blocks = [(1,), (2, 3, 4, 5, 6), (7, 8)]
    chunks = [
        Chunk(each.prompt[:32], 0, held, each.prompt != long, each.sampling)
        for each, held in zip(requests, blocks, strict=True)
    ]
    first, third = engine.submit(Prefill(tuple(chunks))).result()
    (second,) = engine.submit(prefill_of((32,), 32, blocks[1], True, Sampling())).result()
    rows = []
    for slot, token in enumerate((first, second, third)):
        each = requests[slot]
        each.out.append(token)
        rows.append(Row(token, len(each.prompt), slot, blocks[slot], each.sampling))
    for each, token in zip(requests, engine.submit(decode_of(0, rows)).result(), strict=True):
        each.out.append(token)
    assert differences(logits_of(model), requests) == (0, 0)


def test_first_chunks_need_no_table() -> None:
    """Attention, and what is in the pool then, are the same with a table and without."""
    torch.manual_seed(0)
    size, groups, shared, width, steps = 4, 2, 3, 8, torch.arange(9)
    is_there = steps < torch.tensor([9, 1, 6])[:, None]
    positions = torch.where(is_there, steps, 0)
    tables = 1 + torch.randperm(9).view(3, 3)
    entries = torch.where(is_there, tables[:, steps // size] * size + steps % size, 0)
    query = torch.randn(3, groups * shared, 9, width)
    key, value = torch.randn(2, 3, groups, 9, width)
    pools, found = torch.zeros(2, 10 * size, groups, 2 * width), []
    for pool, table in zip(pools, (tables, tables[:, :0]), strict=True):
        cache = PagedCache(Pages({0: pool}, size, positions, entries.flatten(), table))
        mask = cache.mask(causal_mask_function, torch.float32)
        mixed = attend(query, *cache.update(key, value, 0), mask, 0.3, cache)
        found.append(mixed[is_there])
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(pools[0, size:], pools[1, size:])


def test_pools_are_written_to_as_they_are(folder: Path) -> None:
    """A compiler may copy a whole pool of which a view is written to."""
    model, limits = open_model(folder), Limits(1, 2, 32, 10, 8, 64, 64, (), 1)
    with use_world(VirtualWorld(1)):
        stage = make_stage(model, range(2), Pool(10, 8), 8, FEW, 0, torch.device("cpu"))
        size = all_sizes(limits, FEW)[0]
        assert isinstance(size, DecodeSize)
        step = decode_step([stage], limits)
        bodies = step.lower(*size.example(limits, 0)).trace.bodies
    nodes = [node for body in bodies.values() for node in body.graph_and_lines()[0].nodes]
    written = [node.args[0] for node in nodes if "index_copy" in str(node.target)]
    shapes = [tuple(each.meta["val"].shape) for each in written]
    kept = model.caches[0]
    assert shapes.count((80, kept.groups, kept.key + kept.value)) == 2
    assert all(each.op == "placeholder" for each in written)


@pytest.mark.parametrize("tokens", [31, 0, -64])
def test_prompt_tokens_that_hold_no_chunk(tokens: int, folder: Path) -> None:
    said = f"{tokens} prompt tokens, and a chunk alone has 32"
    with use_world(VirtualWorld(1)), pytest.raises(ValueError, match=said):
        start(folder, replace(FEW, prompt_tokens=tokens))


BEGINNING, GOING_ON = (Chunk((1,), at, (1, 2), True, Sampling()) for at in (0, 8))
ASKING = replace(BEGINNING, sampling=Sampling(logprobs=1))


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (Prefill(()), "0 of 3 prompts"),
        (Prefill((BEGINNING,) * 4), "4 of 3 prompts"),
        (Prefill((BEGINNING, GOING_ON)), "a chunk that has to be alone"),
        (Prefill((BEGINNING, ASKING)), "a chunk that has to be alone"),
        (Prefill((BEGINNING, replace(BEGINNING, tokens=()))), "0 tokens of at most 32"),
        (Prefill((BEGINNING, replace(BEGINNING, blocks=(0,)))), "a block is 0"),
        (decode_of(0, (Row(0, 16, 0, (1, 0, 2), Sampling()),)), "a block is 0"),
        (decode_of(2, (Row(0, 0, 0, (1,), Sampling()),)), "group 2 of 2"),
        (decode_of(0, ()), "0 rows of at most 4"),
        (decode_of(0, (Row(64, 0, 0, (1,), Sampling()),)), "a token is 64"),
        (decode_of(0, (Row(0, 0, 4, (1,), Sampling()),)), "a slot is 4"),
        (decode_of(0, (Row(0, 64, 0, tuple(range(1, 10)), Sampling()),)), "a position is 64"),
        (decode_of(0, (Row(0, 8, 0, (1,), Sampling()),)), "1 blocks, and 2 are needed"),
        (decode_of(0, (Row(0, 0, 0, (0,), Sampling()),)), "a block is 0"),
        (decode_of(0, (Row(0, 0, 0, (20,), Sampling()),)), "a block is 20"),
        (prefill_of((), 0, (1,), True, Sampling()), "0 tokens of at most 32"),
        (prefill_of((-1,), 0, (1,), True, Sampling()), "a token is -1"),
        (prefill_of((1,), -1, (1,), True, Sampling()), "a position is -1"),
    ],
)
def test_work_outside_of_the_limits_is_refused(
    work: Decode | Prefill, said: str, engine: CgEngine
) -> None:
    with pytest.raises(ValueError, match=said):
        engine.submit(work)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_gpt_of_make_train(tp: int, tmp_path: Path) -> None:
    config = train_gpt.Config(layers=2, width=48, context=64)
    with use_world(VirtualWorld(2)):
        stages = [
            train_gpt.Stage.on(rank)(config, layers, 3, 1e-3, 10)
            for rank, layers in enumerate(train_gpt.cut(2, 2))
        ]
        for stage in stages:
            for parameter in stage.local.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
        checkpoints.save(tmp_path, stages, cg.trace(lambda x: x), 1, {})

    def logits(ids: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            ids = stage.local.forward(ids)
        return ids

    options = replace(GREEDY, batches=(2,), tp=tp)
    with serving(tmp_path, 2, options) as engine:
        assert engine.limits.vocabulary == 256
        assert engine.limits.prompts == 2  # more could not decode
        requests = greedy(8, 9, engine.limits)
        Driver(engine, Habits(seed=9, companions=2)).run(requests)
    assert differences(logits, requests)[0] == 0


def test_layers_are_cut_evenly() -> None:
    assert split(7, 3) == [3, 2, 2]
    assert split(4, 4) == [1] * 4
    assert split(4, 1, head=9.0) == [4]


@pytest.mark.parametrize(
    ("layers", "stages", "head", "sizes"),
    [
        (24, 2, 1.2, [13, 11]),
        (30, 2, 7.0, [19, 11]),
        (30, 3, 7.0, [13, 12, 5]),
        (8, 4, 99.0, [3, 2, 2, 1]),
        (3, 3, 2.0, [1, 1, 1]),
    ],
)
def test_the_head_is_weighed(layers: int, stages: int, head: float, sizes: list[int]) -> None:
    assert split(layers, stages, head) == sizes


def test_stages_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # on hosts
    model = open_model(GptConfig(layers=4))
    assert [len(part) for part in cut(model, 2, Options())] == [2, 2]
    own = Options(layers=(1, 3))
    assert cut(model, 2, own) == [range(1), range(1, 4)]
    for wrong in ((1, 2), (4,), (0, 4), (2, 1, 1)):
        with pytest.raises(ValueError, match="4 layers in 2 stages as"):
            cut(model, 2, Options(layers=wrong))
    # A vocabulary of 150,000 beside layers of half a million numbers.
    wide = open_model(GptConfig(layers=8, vocabulary=150_000))
    assert [len(part) for part in cut(wide, 2, Options())] == [7, 1]


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        open_model(tmp_path)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize("on_devices", [pytest.param(False, marks=pytest.mark.slow), True])
def test_on_mpi_ranks(ranks: int, on_devices: bool, folder: Path) -> None:
    """Also on fake devices: all graphs are whole there, although they write caches and a carry.

    Variants are compiled between requests, and the tokens are right before and after.
    """
    job = ["tests.examples.serve_job", str(folder)]
    program = ["-m", *(["tests.mpi.device_job"] if on_devices else []), *job]
    ended = run(ranks, program, folder=ROOT, seconds=240, warm=True)
    assert ended.code == 0, ended.output
    assert "rank 1 has served" in ended.output
    whole = re.search(r"(\d+) of \1 whole, \1 replayed", ended.output)
    assert (whole is not None) == on_devices, ended.output
    (found,) = re.findall(r"40 requests, (\d+) tokens: (\d+) differences", ended.output)
    assert int(found[0]) > 100
    assert int(found[1]) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "on_devices"),
    [
        pytest.param(4, False, marks=needs_mpi),
        pytest.param(2, True, marks=[*needs_mpi, pytest.mark.slow]),
    ],
)
def test_stages_of_two_mpi_ranks(ranks: int, on_devices: bool, folders: dict[int, Path]) -> None:
    """Two stages, and one on fake devices, whose graphs are whole with all reductions in them."""
    job = ["tests.examples.serve_job", str(folders[ranks // 2]), "16", "2"]
    program = ["-m", *(["tests.mpi.device_job"] if on_devices else []), *job]
    ended = run(ranks, program, folder=ROOT, seconds=280, warm=True)
    assert ended.code == 0, ended.output
    assert f"rank {ranks - 1} has served" in ended.output
    assert ("13 of 13 whole, 13 replayed" in ended.output) == on_devices, ended.output
    assert re.findall(r"16 requests, \d+ tokens: (\d+) differences", ended.output) == ["0"]
