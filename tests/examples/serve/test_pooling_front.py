"""`/v1/embeddings`, `/v1/score` and `/rerank`: what clients get, and what each mistake is told."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front import fields

from .fake_pooling import FAILS, POOLS, WIDTH, vector_of
from .servers import Server, serving


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    recipe = {"task": "embed", "pooling": "mean", "dimensions": [2, 3]}
    with serving(tmp_path_factory.mktemp("pools"), recipe=recipe) as found:
        yield found
        found.wait_for(found.is_empty, "an empty engine")


@pytest.fixture(scope="module")
def client(pools: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pools.url("/v1"), api_key="none", max_retries=0) as made:
        yield made


def unit(tokens: Any, width: int = WIDTH) -> np.ndarray:
    vector = np.array(vector_of(tokens), np.float32)[:width]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("kind", ["float", "base64", None])
def test_vectors_of_texts_and_tokens(client: openai.OpenAI, kind: str | None) -> None:
    """Without a format openai-python asks for base64, and decodes it."""
    more: Any = {} if kind is None else {"encoding_format": kind}
    texts = ["one", "a longer text of more than sixteen bytes", "é"]
    found = client.embeddings.create(model="fake", input=texts, **more)
    assert [entry.index for entry in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == found.usage.total_tokens == 3 + 40 + 2
    for text, entry in zip(texts, found.data, strict=True):
        vector = entry.embedding
        if kind == "base64":
            import base64

            vector = np.frombuffer(base64.b64decode(str(vector)), "<f4").tolist()
        assert np.allclose(vector, unit(text.encode()), atol=1e-6)
    for given in ([1, 2, 3], [[1, 2, 3]]):
        (entry,) = client.embeddings.create(model="fake", input=given, **more).data
    found = client.embeddings.create(model="fake", input=[[1, 2, 3], [7]])
    assert np.allclose(found.data[1].embedding, unit([7]), atol=1e-6)


def test_vectors_are_cut_where_the_model_allows_it(client: openai.OpenAI) -> None:
    (entry,) = client.embeddings.create(model="fake", input="text", dimensions=2).data
    assert np.allclose(entry.embedding, unit(b"text", 2), atol=1e-6)
    (entry,) = client.embeddings.create(model="fake", input="text", dimensions=WIDTH).data
    assert np.allclose(entry.embedding, unit(b"text"), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions may be 2, 3"):
        client.embeddings.create(model="fake", input="text", dimensions=1)
    more = {"normalize": False}
    (entry,) = client.embeddings.create(model="fake", input="text", extra_body=more).data
    assert np.allclose(entry.embedding, vector_of(b"text"))


def test_texts_are_cut_if_that_is_asked_for(client: openai.OpenAI) -> None:
    for number, length in ((-1, POOLS.context), (5, 5)):
        more = {"truncate_prompt_tokens": number}
        found = client.embeddings.create(model="fake", input="x" * 100, extra_body=more)
        assert found.usage.prompt_tokens == length
        assert np.allclose(found.data[0].embedding, unit(b"x" * length), atol=1e-6)


def test_scores_are_cosines_of_vectors(pools: Server) -> None:
    wanted = [float(unit(b"one") @ unit(text)) for text in (b"two", b"three", b"one")]
    status, found = pools.get("/v1/score", {"text_1": "one", "text_2": ["two", "three", "one"]})
    assert status == 200
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
    assert np.allclose([entry["score"] for entry in found["data"]], wanted, atol=1e-6)
    same = {"queries": ["one", "two"], "documents": ["two", "two"]}
    _, found = pools.get("/score", same)
    assert np.allclose([entry["score"] for entry in found["data"]], [wanted[0], 1.0], atol=1e-6)
    body = {"query": "one", "documents": ["two", "three", "one"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, found = pools.get(path, body)
        assert status == 200
        order = sorted(range(3), key=lambda index: -wanted[index])
        assert [entry["index"] for entry in found["results"]] == order
    _, found = pools.get("/rerank", {**body, "top_n": 1, "return_documents": False})
    ((entry),) = found["results"]
    assert entry.keys() == {"index", "relevance_score"}
    assert entry["index"] == 2


def test_a_cross_encoder_gives_scores_and_no_vectors(tmp_path: Path) -> None:
    with serving(tmp_path, recipe={"task": "score"}) as own:
        _, found = own.get("/score", {"text_1": "one", "text_2": ["two", "three"]})
        scores = [entry["score"] for entry in found["data"]]
        assert scores == [vector_of(b"onetwo")[0], vector_of(b"onethree")[0]]
        status, found = own.get("/v1/embeddings", {"input": "x"})
        assert (status, found["error"]["code"]) == (404, "model_not_supported")


MISTAKES: list[tuple[Any, str]] = [
    ({}, "input is missing: give a text"),
    ({"input": ""}, "an empty text"),
    ({"input": []}, "input is empty"),
    ({"input": ["a", ""]}, "an empty text"),
    ({"input": [[]]}, "an input has no tokens"),
    ({"input": 5}, "input must be a text"),
    ({"input": {"a": 1}}, "input must be a text"),
    ({"input": ["a", 5]}, "input must be a text"),
    ({"input": [True]}, "input must be a text"),
    ({"input": [[1.5]]}, "something that is no token id"),
    ({"input": [256]}, "the token id 256"),
    ({"input": [-1]}, "the token id -1"),
    ({"input": ["a"] * 10_000}, "input has 10000 texts, and a request may have 2048"),
    ({"input": "x" * 65}, "has 65 tokens, and this model takes 64"),
    ({"input": [1] * 65}, "65 tokens"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format must be float or base64"),
    ({"input": "a", "encoding_format": 3}, "encoding_format must be a string"),
    ({"input": "a", "dimensions": 0}, "dimensions must be from 1 to 4"),
    ({"input": "a", "dimensions": "2"}, "dimensions must be a whole number"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "must be -1, or at least 1"),
    ({"input": "a", "max_tokens": 5}, "max_tokens is not supported by this endpoint"),
]


@pytest.mark.parametrize(("body", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_told(pools: Server, body: Any, message: str) -> None:
    status, found = pools.get("/v1/embeddings", body)
    assert status == 400
    assert message in found["error"]["message"]
    assert found["error"]["param"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": "a"}, "text_2 is missing"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2 is empty"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2 must be a text"),
        ("/rerank", {"query": "a", "documents": []}, "documents is empty"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query must be a text"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n must be at least 0"),
        ("/rerank", {"query": "a", "documents": ["b" * 65]}, "a text of documents has 65 tokens"),
    ],
)
def test_mistakes_of_pairs_are_told(pools: Server, path: str, body: Any, message: str) -> None:
    status, found = pools.get(path, body)
    assert status == 400
    assert message in found["error"]["message"]


def test_others_are_served_beside_many_texts_and_failures(pools: Server) -> None:
    """A batch that fails ends the requests of its texts, and no others."""
    many = {"input": [f"text {number}" for number in range(2048)]}
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(pools.get, "/v1/embeddings", many)
        failing = pool.submit(pools.get, "/v1/embeddings", {"input": [FAILS, 1]})
        for number in range(10):
            text = f"a text beside others, of another length {number}"
            status, found = pools.get("/v1/embeddings", {"input": text})
            assert status == 200
            assert np.allclose(found["data"][0]["embedding"], unit(text.encode()), atol=1e-6)
        status, found = failing.result()
        assert (status, found["error"]["message"]) == (500, "ValueError: a method has raised")
        status, found = large.result()
    assert (status, len(found["data"])) == (200, 2048)
    assert np.allclose(found["data"][77]["embedding"], unit(b"text 77"), atol=1e-6)


def test_a_client_that_goes_away_is_forgotten(pools: Server) -> None:
    sock = pools.post({"input": [f"{number}" for number in range(500)]}, "/v1/embeddings")
    sock.close()
    pools.wait_for(pools.is_empty, "an empty engine")


def test_such_a_model_draws_no_tokens(pools: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        status, found = pools.get(path, {"prompt": "a"})
        assert (status, found["error"]["code"]) == (404, "model_not_supported")
        assert "'fake' pools" in found["error"]["message"]
    assert pools.get("/tokenize", {"prompt": "ab"})[1]["tokens"] == [97, 98]
    assert json.dumps(pools.get("/v1/models")[1]["data"][0]["max_model_len"]) == "64"


def test_the_guide_names_every_field() -> None:
    text = (ROOT / "docs/guide/embeddings.md").read_text()
    table = [line.split("|") for line in text.splitlines() if line.startswith("| `/")]
    values = {"float", "base64"}
    named = [set(re.findall(r"`(\w+)`", cells[2])) - values for cells in table]
    assert named == [fields.SERVED[api] for api in ("embeddings", "score", "rerank")]
