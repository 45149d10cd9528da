"""Answers of a server whose engine proposes tokens, and its counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.text import Bytes
from examples.serve.requests import Sampling

from .fake_engine import ROOMY, reference, scores_of
from .servers import Server, serving


@pytest.fixture(scope="module")
def proposing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A draft of which some proposals are right; a token ends the text."""
    limits = {"draft_tokens": 4, "has_draft": True, "eos": [10]}
    with serving(tmp_path_factory.mktemp("proposing"), limits=limits) as server:
        yield server


def text(prompt: str, number: int, sampling: Sampling | None = None) -> str:
    return Bytes().decode(reference(list(prompt.encode()), number, ROOMY, sampling))


@pytest.mark.parametrize("seed", [None, 5])
def test_answers_are_those_without_proposals(seed: int | None, proposing: Server) -> None:
    """Of any number of tokens, as a stream and whole."""
    more = {} if seed is None else {"temperature": 1.0, "seed": seed}
    sampling = None if seed is None else Sampling(1.0, seed=seed)
    before = proposing.metric("spec_decode_num_accepted_tokens_total")
    for number in (1, 2, 3, 25):
        found, body = proposing.complete("proposed", number, ignore_eos=True, **more)
        assert found == 200
        assert body["choices"][0]["text"] == text("proposed", number, sampling)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == number

    def are_counted() -> bool:
        names = ("accepted_tokens", "draft_tokens", "drafts")
        accepted, drafted, drafts = (
            proposing.metric(f"spec_decode_num_{name}_total") for name in names
        )
        return before < accepted < drafted and 0 < drafts < drafted

    proposing.wait_for(are_counted, "counts of proposals, which come behind the answers")


def test_stop_strings_and_ends_among_accepted_tokens(proposing: Server) -> None:
    whole = text("stop here", 60)
    for start in range(18, 24):
        stop = whole[start : start + 2]
        _, body = proposing.complete("stop here", 60, ignore_eos=True, stop=[stop])
        choice = body["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
    prompts = [f"end {number}" for number in range(60)]
    ending = [each for each in prompts if 10 in reference(list(each.encode()), 40, ROOMY)]
    assert len(ending) > 3
    for prompt in ending[:4]:
        tokens = reference(list(prompt.encode()), 40, ROOMY)
        _, body = proposing.complete(prompt, 40)
        choice = body["choices"][0]
        assert choice["text"] == Bytes().decode(tokens[: tokens.index(10)])
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == tokens.index(10) + 1


def test_log_probabilities_of_accepted_tokens(proposing: Server) -> None:
    tokens = list(b"chances")
    wanted = []
    for token in reference(tokens, 20, ROOMY):
        wanted.append(scores_of(tokens, token, ROOMY.vocabulary).drawn)
        tokens.append(token)
    _, body = proposing.complete("chances", 20, ignore_eos=True, logprobs=2)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == wanted


def test_a_stream_gets_all_accepted_tokens(proposing: Server) -> None:
    status, events = proposing.complete("streamed", 30, ignore_eos=True, stream=True)
    assert status == 200
    lines = [line.removeprefix("data: ") for line in events.splitlines() if '"text":"' in line]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == text("streamed", 30)
    assert len(pieces) < 30  # one, where the server was slower than its engine
    assert events.count('"finish_reason":"length"') == 1
    assert events.rstrip().endswith("[DONE]")
