"""Structured output by the server: what fields ask for, and grammars that are hostile or wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from examples.serve.front import fields
from examples.serve.front.errors import ApiError
from examples.serve.front.structure import formats
from examples.serve.structure.check import translated

from ...mpi.jobs import ROOT
from .servers import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "is": {"enum": ["x"]}},
    "required": ["age", "is"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hi"}]
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""Without it the fake engine, which draws at random, writes spaces for the most part."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("structure"), limits={"eos": [0]}) as server:
        yield server


@pytest.fixture(scope="module")
def client(own: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=own.url("/v1"), api_key="none", max_retries=0) as made:
        yield made


def content(own: Server, **more: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 300, "seed": 3, **more}
    status, answer = own.get("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def named(schema: Any) -> dict[str, Any]:
    described = {"name": "it", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": described}


def test_a_schema(own: Server) -> None:
    text = content(own, response_format=named({**SCHEMA, **COMPACT}))
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text.startswith('{"age":')


def test_streams_and_choices_have_their_own_texts(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "seed": 1, "n": 3}
    options["response_format"] = named({**SCHEMA, **COMPACT})
    whole = client.chat.completions.create(**options)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_openai_python_parses(client: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: Literal[1, 2]
        is_far: bool
        name: Literal["a", "ü"] | None

    answer = client.chat.completions.parse(
        model="fake", messages=MESSAGES, response_format=Point, max_tokens=400, temperature=1.0
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"age":.*'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r"\{.*\}"),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": r"(foo|ba/r\/x){2}\d\n"}}, "(foo|ba/r/x){2}\\d\n"),
        ({"structured_outputs": {"choice": ["one", 'a "b"/\n', "é"]}}, 'one|a "b"/\n|é'),
        ({"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= [0-9]'}}, "a[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]/'}}, "a[0-9]"),
        ({"guided_json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"guided_regex": "^x{3}$"}, "xxx"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_grammar": 'root ::= "one"'}, "one"),
        ({"response_format": {"type": "text"}, "guided_choice": ["one"]}, "one"),
    ],
)
def test_each_kind(asked: dict[str, Any], pattern: str, own: Server) -> None:
    assert re.fullmatch(pattern, content(own, **asked), re.DOTALL)


def test_completions_have_structures_too(own: Server) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "guided_choice": ["one", "two"], "max_tokens": 9}
    status, answer = own.get("/v1/completions", body)
    assert status == 200
    assert {choice["text"] for choice in answer["choices"]} <= {"one", "two"}


def test_texts_that_are_cut_off_say_so(own: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "guided_choice": ["longer"]}
    _, answer = own.get("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("lon", "length")


def test_log_probabilities_of_a_forced_token(own: Server) -> None:
    """Those of tokens that the structure forbids are the least that there are."""
    asked = {"guided_choice": ["q"], "logprobs": True, "top_logprobs": 1, "messages": MESSAGES}
    status, answer = own.get("/v1/chat/completions", asked)
    assert status == 200
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "q"


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object"),
        ({"response_format": {}}, "response_format", "must be text, json_object"),
        ({"response_format": named({"not": {}})}, "response_format", "Unimplemented keys"),
        ({"response_format": named({"type": "textt"})}, "response_format", "Invalid type: textt"),
        ({"response_format": named(3)}, "response_format", "must be a JSON schema"),
        ({"response_format": named({"$ref": "http://x/y"})}, "response_format", "not present"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "must have one"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "xml is not supported"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 4096 strings"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "strings"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"guided_grammar": "start: B"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "the grammar cannot be read"),
        ({"guided_regex": 5}, "guided_regex", "must be a string"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "give one of"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "is not for a structure"),
    ],
)
def test_what_is_refused_says_why(
    asked: dict[str, Any], field: str, message: str, own: Server
) -> None:
    status, answer = own.get("/v1/chat/completions", {"messages": MESSAGES, **asked})
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert message in answer["error"]["message"]


def test_a_grammar_of_ten_megabytes(own: Server) -> None:
    """ "A grammar of 10 MB" is too large a body."""
    text = " | ".join(['"a"'] * (10 << 17))
    body = {"messages": MESSAGES, "guided_grammar": f"start: {text}"}
    assert own.get("/v1/chat/completions", body)[0] == 413


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guided_regex": "(a{1000}){1000}(b|a){1000}"}, "too many expressions"),
        ({"guided_grammar": "root ::= " + "(" * 100_000}, "the grammar cannot be read"),
        ({"guided_grammar": "start: " + "(" * 100_000}, "too deeply nested"),
        ({"guided_json": '{"items":' * 5_000 + "{}" + "}" * 5_000}, "nested too deeply"),
    ],
)
def test_hostile_grammars(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    """ "A regular expression without end", "brackets in a grammar": others are served meanwhile."""
    with serving(tmp_path, compile_seconds=60.0) as server:  # on a busy machine, too
        sock = server.post({"messages": MESSAGES, **asked}, "/v1/chat/completions")
        for _ in range(3):
            assert server.complete("others", 4)[0] == 200
        with sock:
            answer = sock.recv(1 << 16)
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert message.encode() in answer
        body = {"messages": MESSAGES, "guided_choice": ["one"]}
        status, found = server.get("/v1/chat/completions", body)
        assert (status, found["choices"][0]["message"]["content"]) == (200, "one")


def test_a_grammar_that_takes_too_long(tmp_path: Path) -> None:
    with serving(tmp_path, compile_seconds=0.0) as server:
        for _ in range(2):  # the second starts the compiler's process again
            body = {"messages": MESSAGES, "guided_choice": ["one"]}
            status, answer = server.get("/v1/chat/completions", body)
            assert status == 400
            assert "takes longer than 0 s to compile" in answer["error"]["message"]
            assert server.complete("others", 4)[0] == 200


def test_schemas_that_multiply(own: Server) -> None:
    parts = [
        {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {}}} for j in range(9)]}
        for i in range(9)
    ]
    body = {"messages": MESSAGES, "response_format": named({"allOf": parts})}
    status, answer = own.get("/v1/chat/completions", body)
    assert (status, answer["error"]["message"]) == (400, "schema too large")


def test_clients_that_leave_while_their_grammar_is_checked(own: Server) -> None:
    hard = {"messages": MESSAGES, "guided_regex": "(a{1000}){1000}(b|a){1000}"}
    for _ in range(3):
        own.post(hard, "/v1/chat/completions").close()
    assert content(own, guided_choice=["one"]) == "one"
    own.wait_for(own.is_empty)


# -- grammars --------------------------------------------------------------------------------------


def test_grammars_of_regular_expressions() -> None:
    assert formats.of_regex("a/b\\/c\n") == {"lark_grammar": "start: /a\\/b\\/c\\n/"}
    assert formats.of_regex("a\\\\/\\\n") == {"lark_grammar": "start: /a\\\\\\/\\n/"}


def test_grammars_of_llama_cpp_become_larks() -> None:
    grammar = formats.grammar(formats.of_grammar('root ::= "x"'))
    parts = json.loads(translated(grammar))["grammars"]
    assert parts[0] == {"name": "main", "lark_grammar": "start: @answer"}
    assert "start:" in parts[1]["lark_grammar"]
    assert translated(formats.grammar(formats.of_choice(["x"]))) == formats.grammar(
        formats.of_choice(["x"])
    )


def test_schemas_keep_their_own_options() -> None:
    rule = formats.of_schema({"x-guidance": {"coerce_one_of": True}}, "x")
    options = {"coerce_one_of": True, "whitespace_pattern": formats.WHITESPACE}
    assert rule == {"json_schema": {"x-guidance": options}}
    with pytest.raises(ApiError, match="x-guidance of x must be an object"):
        formats.of_schema({"x-guidance": 5}, "x")


def test_the_guide_names_every_field_of_structures() -> None:
    text = (ROOT / "docs/guide/structured-output.md").read_text()
    named_ = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    assert named_ >= formats.FIELDS
    assert fields.SERVED["chat"] >= formats.FIELDS
