"""Texts that follow grammars: masks of rows, in the scheduler, and in a model on ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.serve.engine import CgEngine
from examples.serve.front.structure import formats
from examples.serve.ngram import Propose
from examples.serve.requests import End, How, Limits, Request, Sampling
from examples.serve.sampling.draw import LEAST, allowed, draw, score
from examples.serve.scheduler import Scheduler
from examples.serve.settings import Options
from examples.serve.structure.grammars import compiled
from examples.serve.structure.vocabulary import stored, vocabulary
from examples.serve.work import TABLE, Decode, Prefill

from ...mpi.jobs import ROOT, needs_mpi, run
from .. import tiny_model
from ..serve_driver import NEAR
from ..serve_models import serving
from .fake_engine import ROOMY, FakeEngine, FakeResult, guess, reference
from .guided import Outcome, complete
from .schemas import Drawer

LIMITS = replace(ROOMY, blocks=400, context=768, vocabulary=257, eos=(256,))
OPTIONS = Options(
    batches=(8,), chunks=(32,), blocks=400, block_size=16, groups=2, widths=(), late=True
)
CHOICE = formats.grammar(formats.of_choice(["yes", "no", "maybe", "maybe not"]))


class AtOnce(FakeEngine):
    """Runs work when it is submitted, and keeps how it was asked."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.hows: list[How] = []

    def submit(self, work: Decode | Prefill) -> FakeResult:
        result = super().submit(work)
        self.hows.append(work.how)
        self.run_one()
        return result


def grammar_of(schema: object) -> str:
    return formats.grammar(formats.of_schema(schema, "schema", None))


def text_of(outcome: Outcome) -> str:
    return bytes(token for token in outcome.tokens if token < 256).decode()


def of_bytes() -> Any:
    return vocabulary(None, LIMITS.vocabulary, LIMITS.eos)


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [31, 32, 33, 257])
def test_a_bit_allows_a_token(size: int) -> None:
    torch.manual_seed(size)
    takes = torch.rand(5, size) < 0.4
    takes[0], takes[1] = True, False
    takes[1, size - 1] = True
    packed = np.packbits(takes.numpy(), axis=1, bitorder="little")
    words = np.zeros((5, -(-size // 32) * 4), np.uint8)
    words[:, : packed.shape[1]] = packed
    logits = torch.randn(5, size)
    masks = torch.from_numpy(words.view(np.int32))
    assert torch.equal(allowed(logits, masks), logits.masked_fill(~takes, -torch.inf))


def test_log_probabilities_are_those_among_allowed_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    values, tokens = score(
        allowed(logits, torch.tensor([[3]], dtype=torch.int32)), torch.tensor([1]), 3
    )
    wanted = logits[0, :2].log_softmax(0)
    torch.testing.assert_close(values[0], torch.tensor([wanted[1], wanted[1], wanted[0], LEAST]))
    assert tokens[0].tolist() == [1, 0, 2]


# -- the scheduler ---------------------------------------------------------------------------------


def requests_of(count: int, seed: int) -> list[Request]:
    """Some with a choice, some with a number, some with any text."""
    source = random.Random(seed)
    number = grammar_of({"type": "integer", "minimum": 0, "maximum": 99999})
    return [
        Request(
            *(id_, tuple(source.randrange(256) for _ in range(source.randint(1, 60))), 20),
            Sampling(temperature=float(id_ % 2), seed=id_),
            grammar=("", CHOICE, number)[id_ % 3],
        )
        for id_ in range(count)
    ]


def test_texts_follow_their_grammars_and_end_with_them() -> None:
    requests = requests_of(30, 1)
    outcomes = complete(AtOnce(), of_bytes, requests)
    for id_, outcome in outcomes.items():
        assert outcome.end is not None
        if id_ % 3 == 0:
            wanted = reference(requests[id_].prompt, 20, LIMITS, requests[id_].sampling)
            assert outcome.tokens == wanted
        elif id_ % 3 == 1:
            assert text_of(outcome) in ("yes", "no", "maybe not", "maybe")
            assert outcome.end.reason == "stop"
        else:
            assert 0 <= int(text_of(outcome)) <= 99999


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_companions_and_preemptions_change_no_token(seed: int, draft_tokens: int) -> None:
    """Nor do blocks that are short, so that some lose theirs in the middle of a structure.

    Nor do proposals, which rows without grammars get.
    """
    requests = requests_of(12, seed)
    alone = {
        request.id: complete(AtOnce(), of_bytes, [request])[request.id].tokens
        for request in requests
    }
    source, preempted = random.Random(seed), 0

    def disturb(scheduler: Scheduler) -> None:
        nonlocal preempted
        if scheduler.active and source.random() < 0.2:
            scheduler._preempt(scheduler.active[next(reversed(scheduler.active))])
            preempted += 1

    def proposes(request: Request) -> Propose:
        assert not request.grammar
        return lambda tokens, most: guess(tokens, most, request.sampling, LIMITS.vocabulary)

    short = AtOnce(replace(LIMITS, blocks=49, draft_tokens=draft_tokens))
    together = complete(short, of_bytes, requests, disturb, proposes)
    assert {id_: outcome.tokens for id_, outcome in together.items()} == alone
    assert preempted
    assert any(How.MASKED in how for how in short.hows)


def test_rows_without_grammars_run_ahead_of_their_tokens() -> None:
    """A row with a grammar waits for its last token, and so for its mask; others do not."""
    scheduler = Scheduler(LIMITS)

    class Known:
        mask, is_ready = np.full(9, -1, np.int32), True
        is_complete, error = False, ""

    guide = Known()
    scheduler.add(Request(1, (1,), 9))
    scheduler.add(Request(2, (2,), 9), guide)
    first = [*scheduler.schedule()]
    for ticket in first:
        scheduler.complete(ticket, [5] * ticket.work.draws)  # type: ignore[union-attr]
    assert not guide.is_ready
    assert scheduler.take_advances() == [(guide, 5)]
    counts = [len(ticket.work.rows) for ticket in scheduler.schedule()]  # type: ignore[union-attr]
    assert counts == [1, 1]
    guide.is_ready = True
    scheduler.guided(guide, 2)
    (ticket,) = scheduler.schedule()
    assert isinstance(ticket.work, Decode)
    assert ticket.work.masks is not None
    assert How.MASKED in ticket.work.how
    assert list(scheduler.schedule()) == []


@pytest.mark.parametrize("size", [256, 250, 255])
def test_a_model_without_an_end_token(size: int) -> None:
    """A text ends with its structure, which may be empty, and no token beyond is allowed."""
    limits = replace(LIMITS, vocabulary=size, eos=())
    grammars = [formats.grammar({"lark_grammar": f'start: "{text}"'}) for text in ("", "ab")]
    requests = [Request(id_, (1,), 5, grammar=each) for id_, each in enumerate(grammars)]
    outcomes = complete(AtOnce(limits), lambda: vocabulary(None, size, ()), requests)
    assert [text_of(outcomes[id_]) for id_ in (0, 1)] == ["", "ab"]
    assert [outcome.end for outcome in outcomes.values()] == [End(0, "stop", 0), End(1, "stop", 2)]


@pytest.mark.parametrize("spare", [0, 7])
def test_a_tokenizer_without_an_end(spare: int) -> None:
    """Rows of the embedding behind its tokens are never drawn, and a text ends by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = vocabulary(str(tokenizer.to_str()), len(alphabet) + spare, ())
    assert tokens.eos_tokens == [len(alphabet) + spare]
    matcher = compiled(tokens, formats.grammar(formats.of_regex("[ab]c*")))
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert set(allowed.nonzero()[0]) == {alphabet.index("a"), alphabet.index("b")}


def test_a_tokenizer_that_cannot_be_read_fails_its_requests_alone() -> None:
    def load() -> Any:
        raise OSError("no tokenizer")

    requests = [Request(1, (1,), 5, grammar=CHOICE), Request(2, (1,), 5)]
    outcomes = complete(AtOnce(), load, requests)
    assert outcomes[1].end is not None
    assert "no tokenizer" in outcomes[1].end.message
    assert len(outcomes[2].tokens) == 5


def test_a_grammar_that_takes_too_much_on_its_way() -> None:
    hard = formats.grammar(formats.of_regex("(a{1000}){1000}b"))
    outcome = complete(AtOnce(), of_bytes, [Request(1, (1,), 5, grammar=hard)])[1]
    assert outcome.end is not None
    assert (outcome.end.reason, "too many" in outcome.end.message) == ("unfollowed", True)


def check_schemas(engine: Any, load: Any, seeds: range) -> None:
    """Each text is complete, and valid under its schema."""
    schemas = {seed: Drawer(seed).schema() for seed in seeds}
    requests = [
        Request(
            *(seed, (seed % 251, 7), 700),
            Sampling(temperature=1.0, seed=seed),
            grammar=grammar_of(schema),
        )
        for seed, schema in schemas.items()
    ]
    checker = jsonschema.FormatChecker()
    for seed, outcome in complete(engine, load, requests).items():
        assert outcome.end is not None
        assert outcome.end.reason == "stop", (schemas[seed], outcome.end)
        text = text_of(outcome) if load is of_bytes else load.text(outcome.tokens)
        jsonschema.validate(json.loads(text), schemas[seed], format_checker=checker)


def test_texts_of_random_schemas_are_valid() -> None:
    check_schemas(AtOnce(), of_bytes, range(24))


# -- a model ---------------------------------------------------------------------------------------


class Tokens:
    """The vocabulary of a folder, and the text of its tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def __call__(self) -> Any:
        return vocabulary(stored(self.folder), 257, (256,))

    def text(self, tokens: list[int]) -> str:
        return str(self.files.decode([token for token in tokens if token != 256]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.write(
        folder, num_hidden_layers=2, max_position_embeddings=768, initializer_range=0.3
    )
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[CgEngine]:
    """Two stages, with two groups."""
    with serving(folder, 2, OPTIONS) as made:
        yield made


@torch.no_grad()
def check_tokens(folder: Path, outcomes: dict[int, Outcome], requests: list[Request]) -> None:
    """Each token is the one that transformers' model draws under the mask of a matcher."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = Tokens(folder)()
    for request in requests:
        drawn, sampling = outcomes[request.id].tokens, request.sampling
        logits = model(torch.tensor([[*request.prompt, *drawn]])).logits[0].float()
        matcher: LLMatcher | None = compiled(tokens, request.grammar) if request.grammar else None
        for place, token in enumerate(drawn, len(request.prompt)):
            row = logits[place - 1 : place]
            if matcher is not None:
                mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: -(-257 // 32)].copy()
                row = allowed(row, torch.from_numpy(mask)[None])
                assert matcher.consume_token(token)
            near = row.clone()
            near[0, token] += NEAR
            numbers = (place, sampling.seed)
            controls = (sampling.temperature, sampling.top_k, sampling.top_p)
            arguments = [torch.tensor([number]) for number in (*numbers, *controls)]
            assert int(draw(near, *arguments)) == token, (request.id, place)


def mixed(vocabulary_: int) -> list[Request]:
    """Greedy and drawn, with grammars and without, some with log-probabilities."""
    schema = {"type": "array", "items": {"enum": ["a", 12, None]}, "minItems": 2, "maxItems": 4}
    grammar, source = grammar_of(schema), random.Random(5)
    return [
        Request(
            id_,
            tuple(source.randrange(vocabulary_ - 1) for _ in range((3, 40)[id_ % 2])),
            24,
            Sampling(float(id_ % 2), (0, 5)[id_ % 2], seed=id_, logprobs=2 if id_ > 8 else None),
            grammar=grammar if id_ % 3 else "",
        )
        for id_ in range(12)
    ]


def test_tokens_are_those_of_transformers_under_masks(engine: CgEngine, folder: Path) -> None:
    requests = mixed(257)
    outcomes = complete(engine, Tokens(folder), requests)
    check_tokens(folder, outcomes, requests)
    scored = [outcomes[id_].scores for id_ in range(9, 12)]
    assert all(len(scores) >= 5 for scores in scored)
    assert all(each.drawn > LEAST for scores in scored for each in scores)
    for id_ in (1, 2, 4, 5, 7, 8):
        assert isinstance(json.loads(Tokens(folder).text(outcomes[id_].tokens)), list)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{"tp": 2}, {"cp": 2}])
def test_stages_that_are_cut_over_ranks_draw_the_same(ways: dict[str, int], folder: Path) -> None:
    with serving(folder, 2, replace(OPTIONS, **ways, groups=1)) as cut:
        requests = mixed(257)
        outcomes = complete(cut, Tokens(folder), requests)
    check_tokens(folder, outcomes, requests)


def test_masks_of_another_vocabulary_are_refused(engine: CgEngine) -> None:
    rows = np.zeros((1, TABLE + 1), np.int64)
    rows[0, TABLE] = 1
    how = How.DRAWN | How.MASKED
    with pytest.raises(ValueError, match="a mask has 3 words of 9"):
        engine.submit(Decode(0, rows, how, masks=np.zeros((1, 3), np.int32)))


def test_the_first_variant_with_masks_holds_all_work(engine: CgEngine) -> None:
    masked = [size for size in engine.graphs.compiled if size.how == How.DRAWN | How.MASKED]
    assert len(masked) == 2


@pytest.mark.parametrize(
    "count", [16, pytest.param(1000, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))]
)
def test_a_random_model_writes_valid_texts(engine: CgEngine, folder: Path, count: int) -> None:
    check_schemas(engine, Tokens(folder), range(1000, 1000 + count))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize(
    ("on_devices", "ways"),
    [
        pytest.param(False, 1, marks=pytest.mark.slow),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(True, 2, marks=pytest.mark.slow),
    ],
)
def test_on_mpi_ranks(ranks: int, on_devices: bool, ways: int, folder: Path) -> None:
    """Two stages, or one that is cut; also on fake devices, where no host waits unasked."""
    devices = ["tests.mpi.device_job", "--strict"] if on_devices else []
    program = ["-m", *devices, "tests.examples.serve.guided_job", str(folder), str(ways)]
    ended = run(ranks, program, folder=ROOT, seconds=280, warm=True)
    assert ended.code == 0, ended.output
    assert "12 texts are those of transformers" in ended.output
