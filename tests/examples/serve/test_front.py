"""The endpoints, with openai-python as the client: what it parses, and what the text is."""

from __future__ import annotations

import ast
import importlib.util
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import openai
import pytest

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front import fields
from examples.serve.front.names import Names
from examples.serve.front.text import Bytes
from examples.serve.requests import Sampling, Scores

from .fake_engine import ROOMY, reference, scores_of
from .servers import Server, serving


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url("/v1"), api_key="none", max_retries=0) as found:
        yield found


def wanted(prompt: str | list[int], number: int, sampling: Sampling | None = None) -> str:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return Bytes().decode(reference(ids, number, ROOMY, sampling))


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "cg")
    assert model.model_dump()["max_model_len"] == ROOMY.context
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.models.retrieve("other")


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], "é" * 100])
def test_completions(client: openai.OpenAI, prompt: Any) -> None:
    found = client.completions.create(model="fake", prompt=prompt, max_tokens=40, temperature=0)
    (choice,) = found.choices
    assert choice.text == wanted(prompt, 40)
    assert choice.finish_reason == "length"
    assert found.usage is not None
    ids = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (ids, 40)
    assert found.object == "text_completion"


def test_streamed_completions_are_the_unstreamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": "tell", "max_tokens": 60, "seed": 5}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert whole.choices[0].text == wanted("tell", 60, Sampling(1.0, seed=5))
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in texts)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_chats_are_the_unstreamed(client: openai.OpenAI, n: int) -> None:
    options: dict[str, Any] = {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}],
            },
        ],
        "max_completion_tokens": 30,
        "seed": 7,
        "n": n,
    }
    whole = client.chat.completions.create(**options)
    assert whole.object == "chat.completion"
    texts, roles = [""] * n, [""] * n
    for chunk in client.chat.completions.create(**options, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            # The role comes with the first text, so that a first chunk is a first token.
            assert (choice.delta.role == "assistant") == (not texts[choice.index])
            roles[choice.index] += choice.delta.role or ""
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts == [
        wanted("be brief\nhello", 30, Sampling(1.0, seed=7 + index)) for index in range(n)
    ]
    assert roles == ["assistant"] * n
    assert [choice.message.role for choice in whole.choices] == roles


def test_several_prompts(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="fake", prompt=["a", "bc"], n=2, max_tokens=5, temperature=0
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [c.text for c in found.choices] == [wanted("a", 5)] * 2 + [wanted("bc", 5)] * 2
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 20)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_returned(client: openai.OpenAI, stream: bool) -> None:
    text = wanted("stop here", 60)
    stop = text[20:23]
    options: dict[str, Any] = {"model": "fake", "prompt": "stop here", "max_tokens": 60}
    options |= {"temperature": 0, "stop": [stop, "never there"]}
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**options, stream=True)]
    else:
        choices = client.completions.create(**options).choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_text_is_a_token(tmp_path: Path, stream: bool) -> None:
    tokens = reference([1, 2], 30, ROOMY)
    end = tokens[10]
    kept = tokens[: tokens.index(end)]
    with serving(tmp_path, limits={"eos": [end]}) as own:
        if stream:
            _, text = own.complete([1, 2], 30, stream=True)
            assert '"finish_reason":"stop"' in text
            assert text.count('"finish_reason":"stop"') == 1
            return
        _, found = own.complete([1, 2], 30)
        assert found["choices"][0]["text"] == Bytes().decode(kept)
        assert found["choices"][0]["finish_reason"] == "stop"
        assert found["usage"]["completion_tokens"] == len(kept) + 1
        _, found = own.complete([1, 2], 30, ignore_eos=True)
        assert found["choices"][0]["text"] == Bytes().decode(tokens)


def scored(prompt: str, number: int, sampling: Sampling) -> list[tuple[int, Scores]]:
    """The tokens of a completion, each with its log-probabilities."""
    tokens, found = list(prompt.encode()), []
    for token in reference(tokens, number, ROOMY, sampling):
        found.append((token, scores_of(tokens, token, ROOMY.vocabulary)))
        tokens.append(token)
    return found


def name(token: int) -> str:
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_of_chats(client: openai.OpenAI, stream: bool, top: int) -> None:
    options: dict[str, Any] = {"model": "fake", "seed": 3, "max_tokens": 20, "logprobs": True}
    options |= {"messages": [{"role": "user", "content": "chances"}], "top_logprobs": top}
    if stream:
        choices = [c.choices[0] for c in client.chat.completions.create(**options, stream=True)]
    else:
        choices = client.chat.completions.create(**options).choices
    found = [each for c in choices if c.logprobs for each in c.logprobs.content or ()]
    wanted_ = scored("chances", 20, Sampling(1.0, seed=3))
    assert [(each.token, each.bytes, each.logprob) for each in found] == [
        (name(token), [token], its.drawn) for token, its in wanted_
    ]
    for each, (_, its) in zip(found, wanted_, strict=True):
        likeliest = [(name(token), value) for token, value in its.likeliest[:top]]
        assert [(t.token, t.logprob) for t in each.top_logprobs] == likeliest


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stops", [False, True])
def test_log_probabilities_of_completions(client: openai.OpenAI, stream: bool, stops: bool) -> None:
    """They come with the text that they are of; those of a stop string, too, which is not shown."""
    tokens = scored("chances", 20, Sampling())
    text = wanted("chances", 20)
    options: dict[str, Any] = {"model": "fake", "prompt": "chances", "max_tokens": 20}
    options |= {"temperature": 0, "logprobs": 2}
    if stops:
        last = next(token for token, _ in tokens[8:] if token < 128)
        end = [token for token, _ in tokens].index(last)
        options["stop"] = chr(last)
        tokens, text = tokens[: end + 1], text[: text.index(chr(last))]
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**options, stream=True)]
    else:
        choices = client.completions.create(**options).choices
    parts = [c.logprobs for c in choices if c.logprobs]
    joined = {
        key: [each for part in parts for each in getattr(part, key)]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert joined["tokens"] == [name(token) for token, _ in tokens]
    assert joined["token_logprobs"] == [its.drawn for _, its in tokens]
    assert joined["top_logprobs"] == [
        {name(token): value for token, value in its.likeliest[:2]} for _, its in tokens
    ]
    assert "".join(choice.text for choice in choices) == text
    # The last character of a text that is cut off behind a token is the one that the token is in.
    ends = [Bytes().decode([t for t, _ in tokens[: place + 1]]) for place in range(len(tokens))]
    assert joined["text_offset"] == [len(end) - 1 for end in ends]


def asked(prompt: str) -> list[Scores | None]:
    """The log-probabilities of the tokens of a prompt."""
    ids = list(prompt.encode())
    behind = [scores_of(ids[:at], ids[at], ROOMY.vocabulary) for at in range(1, len(ids))]
    return [None, *behind]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [0, 5])
def test_echoes(server: Server, client: openai.OpenAI, stream: bool, number: int) -> None:
    """With their log-probabilities, in chunks of eight tokens, and for several prompts."""
    prompts, options = ["so what, then?", "é"], {"temperature": 0, "max_tokens": number}
    options |= {"model": "fake", "prompt": prompts, "echo": True, "logprobs": 2}
    texts, parts = ["", ""], [dict[str, list[Any]](), dict[str, list[Any]]()]
    answer = client.completions.create(**options, stream=stream)
    for choice in (c for each in (answer if stream else [answer]) for c in each.choices):
        texts[choice.index] += choice.text
        for key in ("token_logprobs", "top_logprobs", "text_offset"):
            values = getattr(choice.logprobs, key)
            parts[choice.index].setdefault(key, []).extend(values)
    for prompt, text, found in zip(prompts, texts, parts, strict=True):
        assert text == prompt + wanted(prompt, number)
        own = [*asked(prompt), *(its for _, its in scored(prompt, number, Sampling()))]
        assert found["token_logprobs"] == [its and its.drawn for its in own]
        assert [top and list(top.values()) for top in found["top_logprobs"]] == [
            its and [value for _, value in its.likeliest[:2]] for its in own
        ]
        ends = [Bytes().decode([*prompt.encode()][: at + 1]) for at in range(len(prompt.encode()))]
        assert found["text_offset"][: len(ends)] == [len(end) - 1 for end in ends]
    if not stream:
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * number
    _, plain = server.get("/v1/completions", {**options, "logprobs": None, "prompt": "so"})
    assert plain["choices"][0]["text"] == "so" + wanted("so", number)


def test_log_probabilities_of_prompts(server: Server) -> None:
    """The text is shared by others, whose prefix has no logits."""
    prompt, options = "a prompt of more than sixteen tokens", {"temperature": 0, "max_tokens": 3}
    for _ in range(2):
        _, found = server.complete(prompt, 3, prompt_logprobs=1, return_token_ids=True)
        (choice,) = found["choices"]
        assert choice["prompt_token_ids"] == list(prompt.encode())
        assert choice["token_ids"] == reference(list(prompt.encode()), 3, ROOMY)
        for token, listed, its in zip(
            prompt.encode(), choice["prompt_logprobs"], asked(prompt), strict=True
        ):
            assert (listed is None) == (its is None)
            if its is not None:
                own = {"logprob": its.drawn, "rank": 0, "decoded_token": name(token)}
                assert listed == {str(token): own}
    status, error = server.complete(prompt, 3, prompt_logprobs=1, stream=True)
    assert (status, error["error"]["param"]) == (400, "prompt_logprobs")
    assert server.complete(prompt, 0)[0] == 400
    messages = [{"role": "user", "content": prompt}]
    _, chat = server.get(
        "/v1/chat/completions", {"messages": messages, "prompt_logprobs": 0, **options}
    )
    assert len(chat["prompt_logprobs"]) == len(prompt)


def test_counts_in_every_chunk(client: openai.OpenAI) -> None:
    counts = {"include_usage": True, "continuous_usage_stats": True}
    options: dict[str, Any] = {"model": "fake", "prompt": "tell", "max_tokens": 9}
    *chunks, last = client.completions.create(**options, stream=True, stream_options=counts)
    drawn = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(drawn) == len(chunks)
    assert drawn == sorted(drawn)
    assert (drawn[-1], chunks[0].usage.prompt_tokens, last.usage.total_tokens) == (9, 4, 13)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_named(server: Server, stream: bool) -> None:
    tokens = reference([1, 2], 30, ROOMY)
    end = tokens[10]
    kept = tokens[: tokens.index(end)]
    more = {"stop_token_ids": [end], "stream": stream, "request_id": 'a"b'}
    _, found = server.complete([1, 2], 30, **more)
    if stream:
        assert f'"finish_reason":"stop","stop_reason":{end}' in found
        assert '"id":"cmpl-a\\"b"' in found
        return
    (choice,) = found["choices"]
    assert (choice["text"], choice["stop_reason"]) == (Bytes().decode(kept), end)
    assert found["id"] == 'cmpl-a"b'


def test_log_probabilities_change_no_text_and_are_not_there_unasked(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": "x", "max_tokens": 30, "seed": 1}
    plain = client.completions.create(**options)
    assert plain.choices[0].logprobs is None
    assert client.completions.create(**options, logprobs=0).choices[0].text == plain.choices[0].text


PARAMETERS = {
    "chat": openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming,
    "completions": openai.types.completion_create_params.CompletionCreateParamsNonStreaming,
}
ODD = ["x", 3, 0.25, True, {"a": "b"}, ["x"]]
"""Values of every type; what is refused asks for something with any of them."""


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_each_field_is_served_or_changes_nothing_or_is_refused_by_name(
    server: Server, api: str
) -> None:
    """Also those that openai-python will have tomorrow, and those of nobody."""
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[api]
    base: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    messages = [{"role": "user", "content": "x"}]
    base |= {"prompt": "x"} if api == "completions" else {"messages": messages}
    status, plain = server.get(path, base)
    assert status == 200
    known = set(get_type_hints(PARAMETERS[api])) | {"nobodys"}
    known |= set(fields.NEUTRAL)
    for name_ in known - fields.SERVED[api]:
        assert server.get(path, {**base, name_: None})[0] == 200
        for value in ODD:
            if value in fields.NEUTRAL.get(name_, ()):
                continue
            status, found = server.get(path, {**base, name_: value})
            if name_ in fields.IGNORED:
                assert (status, found["choices"]) == (200, plain["choices"])
            else:
                assert (status, found["error"]["param"]) == (400, name_)
                assert f"{name_} is not supported" in found["error"]["message"]
        for value in fields.NEUTRAL.get(name_, ()):
            status, found = server.get(path, {**base, name_: value})
            assert (status, found["choices"]) == (200, plain["choices"])


def test_the_guide_names_every_field() -> None:
    """The table of the guide is that of `fields.py`."""
    text = (ROOT / "docs/guide/serving.md").read_text()
    _, _, rest = text.partition("## Fields of requests")
    table = [line.split("|") for line in rest.partition("\n## ")[0].splitlines() if "|" in line]
    named = [set(re.findall(r"`(\w+)`", cells[1])) for cells in table[2:]]
    served = fields.SERVED["completions"] | fields.SERVED["chat"]
    assert named == [served, fields.IGNORED, set(fields.NEUTRAL)]


def test_every_line_of_the_guides_tables_has_its_test() -> None:
    """Of hostile clients and faults: a docstring quotes each attack and each fault."""
    text = (ROOT / "docs/guide/serving-faults.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    lines = {each.strip() for row in rows for each in row.split(";") if "---" not in row}
    quoted: set[str] = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found = " ".join((ast.get_docstring(node) or "").split())
                quoted |= {each.lower() for each in re.findall(r'"([^"]+)"', found)}
    assert len(lines) > 40
    heads = {"a client does this", "a fault"}
    assert {each for each in lines - heads if each.lower() not in quoted} == set()


def test_errors_are_those_of_openai(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt=[1] * 513)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="together more than this model's context"):
        client.completions.create(model="fake", prompt=[1] * 500, max_tokens=20)
    with pytest.raises(openai.InternalServerError, match="ValueError: a method has raised"):
        client.completions.create(model="fake", prompt=[255, 1])
    stream = client.completions.create(model="fake", prompt=[255, 1], stream=True)
    with pytest.raises(openai.APIError, match="a method has raised"):
        list(stream)
    assert server.get("/nowhere")[0] == 404
    assert server.get("/v1/completions")[0] == 405


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_endpoints_of_other_models_say_so(server: Server, path: str) -> None:
    status, found = server.get(path, {"input": "x"})
    assert (status, found["error"]["code"]) == (404, "model_not_supported")
    assert "needs a model that pools" in found["error"]["message"]


def test_adapters_are_asked_for_by_name(tmp_path: Path) -> None:
    """An engine that has fewer than the front refuses the number of the other."""
    with serving(tmp_path, adapters=["first", "second"], limits={"adapters": 1}) as own:
        _, cards = own.get("/v1/models")
        shown = [(card["id"], card["root"], card.get("parent")) for card in cards["data"]]
        assert shown == [
            ("fake", "fake", None),
            ("first", "fake", "fake"),
            ("second", "fake", "fake"),
        ]
        status, body = own.complete("named", 3, model="first")
        assert (status, body["model"]) == (200, "first")
        status, body = own.complete("named", 3, model="second")
        assert status == 500
        assert "adapter 2, of 1" in body["error"]["message"]
        status, body = own.complete("named", 3, model="third")
        assert status == 404
        assert "this server has 'fake', 'first', 'second'" in body["error"]["message"]


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ValueError, match="two things would be served by one name: a"):
        Names(("a", "b"), ("a",))


def test_a_key_is_wanted(tmp_path: Path) -> None:
    """ "No key"."""
    with serving(tmp_path, key="sesame") as own:
        for key in (None, "", "Sesame", "sesam", "\udcff"):
            status, body = own.get(
                "/v1/models", key=key and key.encode("utf-8", "replace").decode()
            )
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert own.get("/tokenize", {"prompt": "x"})[0] == 401
        assert own.get("/v1/models", key="sesame")[0] == 200
        assert [own.get(path)[0] for path in ("/health", "/ready", "/metrics", "/")] == [200] * 4


def test_tokens_and_text(server: Server) -> None:
    assert server.get("/tokenize", {"prompt": "hé"})[1] == {
        "tokens": [104, 195, 169],
        "count": 3,
        "max_model_len": 512,
    }
    assert server.get("/detokenize", {"tokens": [104, 195, 169]}) == (200, {"prompt": "hé"})
    messages = [{"role": "user", "content": "a"}]
    assert server.get("/tokenize", {"messages": messages})[1]["tokens"] == [97]
    assert server.get("/detokenize", {"tokens": [256]})[0] == 400
    assert server.get("/tokenize", {"prompt": [1]})[0] == 400


def test_metrics_have_the_names_of_vllm(clean: Server) -> None:
    before = clean.metric("generation_tokens_total")
    clean.complete("count", 9)
    text = clean.get("/metrics")[1]
    assert clean.metric("generation_tokens_total") == before + 9
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total"),
        *("request_success_total", "time_to_first_token_seconds_bucket", "preemptions_total"),
        *("inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count"),
        "request_queue_time_seconds_bucket",
    ):
        assert f"\ncg:{name}" in text


NEEDS_UVLOOP = pytest.mark.skipif(
    importlib.util.find_spec("uvloop") is None, reason="no uvloop: pip install uvloop"
)


@pytest.mark.parametrize(
    ("features", "name"),
    [
        *[(f"-{name}", name) for name in ("flat_evts", "batch_send", "fast_sse")],
        *[(f"-{name}", name) for name in ("async_stream", "async_sched", "carry", "fast_cnt")],
        *[(f"+{name}", name) for name in ("stream_interval", "stream_tok", "queue_ipc")],
        ("+shm_ring", "shm_ring"),
        pytest.param("+uvloop", "uvloop", marks=NEEDS_UVLOOP),
    ],
)
def test_switches_change_no_text_and_count_what_they_change(
    tmp_path: Path, features: str, name: str
) -> None:
    with serving(tmp_path, features=features, delay=0.001) as own:
        socks = [own.post({"prompt": [i], "max_tokens": 20, "temperature": 0}) for i in range(90)]
        for sock in socks:
            assert b" 200 OK" in sock.recv(1 << 16)
            sock.close()
        options: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "temperature": 0}

        def is_counted() -> bool:
            """Ask again; the front stops for a moment, so that tokens have to be merged."""
            with openai.OpenAI(base_url=own.url("/v1"), api_key="none") as client:
                stream = client.completions.create(model="fake", stream=True, **options)
                text = next(stream).choices[0].text
                own.process.send_signal(signal.SIGSTOP)
                time.sleep(0.02)
                own.process.send_signal(signal.SIGCONT)
                text += "".join(chunk.choices[0].text for chunk in stream)
            assert text == wanted("hello", 40)
            return own.metric(f'feature_changes_total{{feature="{name}"}}') > 0

        own.wait_for(is_counted, f"what {name} counts")
        _, found = own.complete("chances", 8, logprobs=1)
        values = [its.drawn for _, its in scored("chances", 8, Sampling())]
        assert found["choices"][0]["logprobs"]["token_logprobs"] == values
