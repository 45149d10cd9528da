"""`/v1/responses` with openai-python as the client, names of the model, and pages that may ask."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from examples.serve.front.errors import ApiError
from examples.serve.front.responses.requests import as_chat

from .servers import PATIENCE, Server, serving

ORIGIN = "https://page.example"


class Point(BaseModel):
    x: Literal[1, 2]
    is_far: bool


TOOL = {
    "type": "function",
    "name": "get",
    "parameters": {**Point.model_json_schema(), "additionalProperties": False},
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {"names": ["fake", "other"], "origins": [ORIGIN]}
    options |= {"limits": {"eos": [0], "context": 2048, "blocks": 600}, "dialect": ["hermes"]}
    with serving(tmp_path_factory.mktemp("responses"), **options) as server:
        yield server


@pytest.fixture(scope="module")
def client(own: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=own.url("/v1"), api_key="none", max_retries=0) as made:
        yield made


def test_a_text(client: openai.OpenAI, own: Server) -> None:
    """The tokens of a chat with the same messages."""
    answer = client.responses.create(
        model="fake", input="hi", instructions="be brief", temperature=0, max_output_tokens=20
    )
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 20,
        "temperature": 0,
    }
    _, wanted = own.get("/v1/chat/completions", chat)
    assert answer.output_text == wanted["choices"][0]["message"]["content"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.model) == ("be brief", "fake")


def test_a_structure_whole_and_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "input": "hi", "text_format": Point}
    whole = client.responses.parse(**options, temperature=0)
    assert isinstance(whole.output_parsed, Point)
    assert whole.status == "completed"
    with client.responses.stream(**options, temperature=0) as stream:
        events = [*stream]
        last = stream.get_final_response()
    assert last.output_parsed == whole.output_parsed
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.output_text


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [TOOL], "temperature": 0}
    options |= {"tool_choice": {"type": "function", "name": "get"}}
    whole = client.responses.create(**options)
    (call,) = whole.output
    assert call.type == "function_call"
    Point.model_validate_json(call.arguments)
    arguments, done = "", ""
    for event in client.responses.create(**options, stream=True):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        if event.type == "response.function_call_arguments.done":
            done = event.arguments
        if event.type == "response.completed":
            Response.model_validate(event.response.model_dump())
    assert arguments == done == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    history: Any = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), result]
    again = client.responses.create(model="fake", input=history, max_output_tokens=5)
    assert again.status == "incomplete"


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id_, name in (("1", "f"), ("2", "g"))
    ]
    assert as_chat({"input": items})["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls, "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing"),
        ({"input": 5}, "input must be a text, or a list"),
        ({"input": [5]}, "items of input must be messages"),
        ({"input": [{"type": "image_generation_call"}]}, "items of input must be messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "must be texts"),
        ({"input": "x", "previous_response_id": "y"}, "previous_response_id is not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "must have the type function"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"input": "x", "instructions": 5}, "instructions must be a string"),
    ],
)
def test_what_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        as_chat(body)


def test_a_model_may_have_several_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["fake", "other"]
    answer = client.completions.create(model="other", prompt="x", max_tokens=1)
    assert answer.model == "fake"
    with pytest.raises(openai.NotFoundError, match="this server has 'fake', 'other'"):
        client.completions.create(model="third", prompt="x", max_tokens=1)


def test_the_version(own: Server) -> None:
    assert own.get("/version") == (200, {"version": metadata.version("cg")})


@pytest.mark.parametrize("origin", [ORIGIN, "https://others.example"])
@pytest.mark.parametrize("stream", [False, True])
def test_pages_that_may_ask(own: Server, origin: str, stream: bool) -> None:
    """Also those whose requests are refused; others get no leave."""

    def ask(method: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            own.url("/v1/completions"), data, {"Origin": origin, **named}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers

    leave = ORIGIN if origin == ORIGIN else None
    asked = {"Access_Control_Request_Method": "POST"}
    status, headers = ask("OPTIONS", None, **asked)
    assert (status == 204) == (leave is not None)
    assert headers["Access-Control-Allow-Origin"] == leave
    if leave:
        assert headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
    for body, wanted in (({"prompt": "x", "stream": stream}, 200), ({}, 400)):
        status, headers = ask("POST", body)
        assert (status, headers["Access-Control-Allow-Origin"]) == (wanted, leave)
