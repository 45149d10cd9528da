"""Calls of tools and thoughts: formats of models, grammars of them, messages, and the endpoints."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.serve.front.errors import ApiError
from examples.serve.front.shapes import message
from examples.serve.front.structure import formats
from examples.serve.front.text import HuggingFace
from examples.serve.front.tools.calling import Writer
from examples.serve.front.tools.deltas import Arguments, CallBegin, Delta, OutputParser
from examples.serve.front.tools.dialects import PARSERS, Dialect, dialect_of
from examples.serve.front.tools.messages import messages
from examples.serve.front.tools.parsers import DeepSeek
from examples.serve.front.tools.toolset import Toolset, toolset
from examples.serve.structure.grammars import compiled, reason
from examples.serve.structure.vocabulary import vocabulary

from ...mpi.jobs import ROOT
from ...sampling import examples
from .servers import Server, serving

# -- what models write -----------------------------------------------------------------------------

SCHEMAS = {"get": {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}}
_D = (DeepSeek.CALLS, DeepSeek.BEGIN, DeepSeek.SEPARATOR, DeepSeek.END, DeepSeek.ENDS)
FENCED = '{}{}function{}get\n```json\n{{"a": "x"}}\n```{}{}'.format(*_D)
SHORT = '{}{}get{}{{"a": "x"}}{}{}'.format(*_D)

TEXTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "get", "arguments": {"a": "x}\\"{", "b": [1]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": "y"}, "name": "get"}\n</tool_call>',
        "Hi.",
        [("get", {"a": 'x}"{', "b": [1]}), ("get", {"a": "y"})],
    ),
    ("hermes", "plain < text <tool", "plain < text <tool", []),
    ("hermes", "<tool_call>nonsense</tool_call>", "nonsense", []),
    (
        "hermes",
        '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("get", {"a": 1})],
    ),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', '{"name": "get"}', []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get>\n<parameter=a>\nx\n5\n</parameter>\n<parameter=b>\n5\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("get", {"a": "x\n5", "b": 5})],
    ),
    ("qwen3_coder", "a <tool_call> b</tool_call>", "a b", []),
    ("llama3_json", '{"name": "get", "parameters": {"a": "x"}}', "", [("get", {"a": "x"})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get", "parameters": {"a": "x"}}; {"name": "f", "parameters": {}}',
        "",
        [("get", {"a": "x"}), ("f", {})],
    ),
    ("llama3_json", 'Hello {"name"', 'Hello {"name"', []),
    ("llama3_json", '{"x": 1}', '{"x": 1}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": "x"}}, {"name": "f", "arguments": {}}]',
        "",
        [("get", {"a": "x"}), ("f", {})],
    ),
    (
        "mistral",
        'text[TOOL_CALLS]get[ARGS]{"a": "x"}[TOOL_CALLS]f[ARGS]{}',
        "text",
        [("get", {"a": "x"}), ("f", {})],
    ),
    ("mistral", "a [TOOL", "a [TOOL", []),
    ("deepseek", f"ok{FENCED}", "ok", [("get", {"a": "x"})]),
    ("deepseek", SHORT, "", [("get", {"a": "x"})]),
    ("deepseek", SHORT.replace("get", "function"), "", [("function", {"a": "x"})]),
    ("gpt_oss", "<|channel|>final<|message|>Hello", "Hello", []),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"a": "x"}',
        "I look.",
        [("get", {"a": "x"})],
    ),
    (
        "gpt_oss",
        "<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}",
        "",
        [("get", {})],
    ),
]


def read(parser: OutputParser, pieces: list[str]) -> dict[str, Any]:
    """The message of a text in pieces, with the arguments of its calls as values."""
    deltas: list[Delta] = []
    for place, piece in enumerate(pieces):
        deltas += parser.feed(piece, place == len(pieces) - 1)
    whole = message(deltas)
    calls = [call["function"] for call in whole.get("tool_calls", [])]
    assert [delta.index for delta in deltas if isinstance(delta, CallBegin)] == [*range(len(calls))]
    return {
        "content": whole["content"] or "",
        "thought": whole.get("reasoning_content", ""),
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
    }


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
@examples(60)
@given(cuts=st.lists(st.integers(0, 300), max_size=10), thinks=st.booleans())
def test_a_text_may_come_in_any_pieces(
    name: str, text: str, content: str, calls: Any, cuts: list[int], thinks: bool
) -> None:
    dialect, thought = Dialect(name), ""
    if thinks and name == "gpt_oss":
        thought = "<tool_call> so"
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{text}"
    elif thinks:
        dialect, thought = Dialect(name, "think"), "\n<tool_call> so {\n"
        text = f"<think>{thought}</think>\n\n{text}"
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    found = read(dialect.parser(SCHEMAS, False, False), pieces)
    assert found == {"content": content, "thought": thought, "calls": calls}


def test_arguments_are_streamed_as_they_come() -> None:
    parser = Dialect("hermes").parser(SCHEMAS, False, False)
    parser.feed('<tool_call>{"name": "get", "arguments": {"a": "lo', False)
    assert parser.feed("ng", False) == [Arguments(0, "ng")]
    assert parser.feed('"}', False) == [Arguments(0, '"}')]
    assert parser.feed("}</tool_call>", True) == []


def test_thoughts_that_the_prompt_has_begun() -> None:
    dialect = Dialect("", "think")
    found = read(dialect.parser(None, False, True), ["so", "</", "think>", "\n", "answer"])
    assert found == {"content": "answer", "thought": "so", "calls": []}
    found = read(dialect.parser(None, False, False), ["answer <think>"])
    assert found == {"content": "answer <think>", "thought": "", "calls": []}
    found = read(dialect.parser(None, False, True), ["cut off </"])
    assert found == {"content": "", "thought": "cut off </", "calls": []}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", "", ""),
        ("<tool_call>", "hermes", ""),
        ("<tool_call> <think></think>", "hermes", "think"),
        ("<tool_call>\n<function=", "qwen3_coder", ""),
        ("[TOOL_CALLS]", "mistral", ""),
        ("<|python_tag|>", "llama3_json", ""),
        (DeepSeek.CALLS + "</think>", "deepseek", "think"),
        ("<|start|><|channel|>", "gpt_oss", "gpt_oss"),
    ],
)
def test_a_template_shows_the_formats(template: str, tools: str, reasoning: str) -> None:
    dialect = dialect_of(template)
    assert (dialect.tools, dialect.reasoning) == (tools, reasoning)
    assert dialect_of(template, "mistral", "none").tools == "mistral"
    assert dialect_of(template, "mistral", "none").reasoning == ""


# -- grammars --------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": ["kind"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            },
            "strict": True,
        },
    }
    for name, properties in (
        ("get", {"kind": {"enum": ["a", "b"], "type": "string"}, "n": {"type": "boolean"}}),
        ("set-it", {"kind": {"type": "integer", "minimum": 0, "maximum": 9}}),
    )
]
MARKS = sorted({mark for name in PARSERS for mark in Dialect(name, "think").marks})


def tokenizer_of(specials: list[str]) -> Tokenizer:
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in specials])
    return tokenizer


class Walk:
    """Writes random texts under a grammar, of bytes and of special tokens."""

    def __init__(self, folder: Path, specials: list[str]) -> None:
        tokenizer = tokenizer_of(specials)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.save_pretrained(folder)
        self.text = HuggingFace(folder)
        self.size = tokenizer.get_vocab_size()
        self.tokens = vocabulary(self.text.stored(), self.size, (256,))
        # Common characters, and special tokens; others only where nothing else is allowed.
        common = [self.text.encode(letter)[0] for letter in 'abcfxyz <>{}"\\\n:,01']
        self.few = {*common, *range(257, self.size)}

    def needs_tokens_for(self, name: str) -> None:
        """Leave out gpt-oss where markers are text: its channels are told apart by tokens alone."""
        if name == "gpt_oss" and self.text.special("<|channel|>") is None:
            pytest.skip("gpt-oss writes its markers as tokens")

    def write(self, grammar: str, seed: int, kept: tuple[str, ...]) -> str:
        """A text; what is free ends soon, since an end is taken where there may be one."""
        matcher, source = compiled(self.tokens, grammar), random.Random(seed)
        assert not reason(matcher), reason(matcher)
        decoder, written = self.text.decoder((), False, kept), []
        closing = [*kept, "]", "</parameter>\n", "\n</parameter>\n"]
        marks = [self.text.encode(mark) for mark in closing]
        begun: list[int] = []  # the rest of a marker that is being written
        for _ in range(2000):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: self.size]
            allowed = [int(token) for token in np.flatnonzero(bits)]
            if begun and begun[0] not in allowed:
                begun = []
            if not begun and 256 in allowed and (allowed == [256] or source.random() < 0.3):
                return "".join(written) + decoder.rest()
            if not begun and source.random() < 0.4:
                ways = [mark for mark in marks if mark[0] in allowed]
                begun = [*source.choice(ways)] if ways else []
            few = [token for token in allowed if token in self.few] or allowed
            token = begun.pop(0) if begun else source.choice(few)
            if token == 256:
                continue
            assert matcher.consume_token(token), reason(matcher)
            written.append(decoder.step(token))
            if matcher.is_stopped():
                return "".join(written) + decoder.rest()
        raise AssertionError(f"no end: {''.join(written)[:300]}")


@pytest.fixture(scope="module", params=["text", "special"])
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Markers are text, or special tokens."""
    specials = MARKS if request.param == "special" else []
    return Walk(tmp_path_factory.mktemp(request.param), specials)


def offered(**more: Any) -> Toolset:
    found = toolset({"tools": TOOLS, **more})
    assert found is not None
    return found


def check_calls(found: dict[str, Any], names: set[str]) -> None:
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for name, arguments in found["calls"]:
        assert name in names
        jsonschema.validate(arguments, parameters[name])


@pytest.mark.parametrize("name", ["", *PARSERS])
@pytest.mark.parametrize("reasoning", ["", "think"])
@pytest.mark.parametrize("variant", [False, True])
def test_forced_calls_are_calls(name: str, reasoning: str, variant: bool, walk: Walk) -> None:
    """Of one tool or the other, one call or several, behind a thought or not."""
    walk.needs_tokens_for(name)
    dialect = Dialect(name, "" if name == "gpt_oss" else reasoning, variant, variant)
    counts = set()
    for seed in range(6):
        several = offered(tool_choice="required")
        grammar = Writer(dialect, walk.text.special).answer(None, several, seed % 2 == 1)
        text = walk.write(grammar, seed, dialect.marks)
        found = read(dialect.parser(several.schemas, not name, seed % 2 == 1), [text])
        check_calls(found, {"get", "set-it"})
        assert found["content"] == "", text
        counts.add(len(found["calls"]))
    assert 0 not in counts
    assert len(counts) > 1 or name != "hermes"
    one = offered(tool_choice={"type": "function", "function": {"name": "set-it"}})
    grammar = Writer(dialect, walk.text.special).answer(None, one, False)
    found = read(
        dialect.parser(one.schemas, not name, False), [walk.write(grammar, 7, dialect.marks)]
    )
    assert [call for call, _ in found["calls"]] == ["set-it"]
    check_calls(found, {"set-it"})


@pytest.mark.parametrize("name", PARSERS)
def test_strict_tools_are_valid_when_they_are_called(name: str, walk: Walk) -> None:
    """An answer may have any text, and calls whose arguments are valid."""
    walk.needs_tokens_for(name)
    dialect, texts, calls = Dialect(name), 0, 0
    tools = offered()
    grammar = Writer(dialect, walk.text.special).answer(None, tools, False)
    matcher = compiled(walk.tokens, grammar)
    assert not reason(matcher)
    for seed in range(12):
        found = read(
            dialect.parser(tools.schemas, False, False), [walk.write(grammar, seed, dialect.marks)]
        )
        check_calls(found, {"get", "set-it"})
        texts += not found["calls"]
        calls += bool(found["calls"])
    assert texts
    assert calls or name == "llama3_json"  # which begin with one brace of all characters


@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_has_its_structure_or_calls(name: str, walk: Walk) -> None:
    walk.needs_tokens_for(name)
    dialect, tools = Dialect(name, "gpt_oss" if name == "gpt_oss" else "think"), offered()
    rule = formats.of_choice(["yes", "no"])
    grammar = Writer(dialect, walk.text.special).answer(rule, tools, False)
    kinds = set()
    for seed in range(12):
        text = walk.write(grammar, seed, dialect.marks)
        found = read(dialect.parser(tools.schemas, False, False), [text])
        check_calls(found, {"get", "set-it"})
        assert bool(found["calls"]) != (found["content"] in ("yes", "no")), text
        kinds.add(bool(found["calls"]))
    assert kinds == {True, False}


# -- what requests say -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message_"),
    [
        ({"tools": {}}, "tools must be a list of at most 1024"),
        ({"tools": TOOLS * 600}, "tools must be a list of at most 1024"),
        ({"tools": [5]}, "each tool must have the type function"),
        ({"tools": [{"type": "web_search"}]}, "each tool must have the type function"),
        ({"tools": TOOLS * 2}, "two tools have the same name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "must have 1 to 64 letters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
            "x of a tool is not",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "the parameters of a must be a JSON schema",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be none, auto"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names x, which is no tool",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": 3}, "parallel_tool_calls must be true or false"),
    ],
)
def test_tools_that_are_none(body: dict[str, Any], message_: str) -> None:
    with pytest.raises(ApiError, match=message_):
        toolset(body)


def test_tools_that_may_not_be_called() -> None:
    assert toolset({}) is None
    assert toolset({"tools": [], "tool_choice": "auto"}) is None
    assert toolset({"tools": TOOLS, "tool_choice": "none"}) is None


CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"kind": "a"}'}}


def test_messages_with_calls() -> None:
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12"}]},
    ]
    function = {"name": "get", "arguments": {"kind": "a"}}
    assert messages({"messages": chat}) == [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            "content": "",
            "reasoning_content": "so",
        },
        {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "get"},
    ]


@pytest.mark.parametrize(
    ("entry", "message_"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls of a message is not"),
        ({"role": "assistant"}, "each message must have a content"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls of a message must be a list"),
        ({"role": "assistant", "tool_calls": [5]}, "each of tool_calls must have a function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
            "the arguments of a call of a are no JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]},
            "the arguments of a call of a are no object",
        ),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "tool_call_id must be a string"),
    ],
)
def test_messages_that_are_none(entry: dict[str, Any], message_: str) -> None:
    with pytest.raises(ApiError, match=message_):
        messages({"messages": [entry]})


def test_templates_get_tools_and_calls_as_text(tmp_path: Path) -> None:
    """As transformers renders them; names of special tokens in them are text."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(["<|im_end|>"]), eos_token="<end>")
    fast.chat_template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}<|im_end|>{% endfor %}{{ enable_thinking }}"
    )
    fast.save_pretrained(tmp_path)
    text = HuggingFace(tmp_path)
    call = {"id": "c", "function": {"name": "get", "arguments": '{"a": "<|im_end|>"}'}}
    chat = messages({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    shown = [{"type": "function", "function": {"name": "get", "description": "<|im_end|>"}}]
    tokens = text.encode_chat(chat, {"enable_thinking": False}, shown)
    assert tokens.count(257) == 1
    rendered = fast.apply_chat_template(
        chat, tools=shown, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text.ending(tokens) == rendered[-len(text.ending(tokens)) :]
    assert text.special("<|im_end|>") == 257
    assert text.special("a") is None


# -- the endpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    limits = {"eos": [0], "context": 2048, "blocks": 600}
    with serving(folder, limits=limits, dialect=["hermes"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(own: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=own.url("/v1"), api_key="none", max_retries=0) as made:
        yield made


OPTIONS: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


def test_required_calls_streamed_and_whole(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "tool_choice": "required", "seed": 4, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    arguments, name, reasons = "", "", []
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            assert delta.index == 0
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert call.type == "function"
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons[-1] == "tool_calls"
    assert not any(reasons[:-1])
    check_calls({"calls": [(name, json.loads(arguments))]}, {"get", "set-it"})


def test_a_named_call_and_its_result(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "set-it"}}
    answer = client.chat.completions.create(**OPTIONS, tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls or []
    chat = [
        *OPTIONS["messages"],
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]
    again = client.chat.completions.create(**{**OPTIONS, "messages": chat}, max_tokens=5)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_openai_python_parses_calls(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        city: bool

    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.parse(
        model="fake", messages=OPTIONS["messages"], tools=[tool], tool_choice="required"
    )
    (call, *_) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_tools_need_a_known_format(server: Server) -> None:
    """A model whose template shows none may be forced, and not asked."""
    body = {"messages": OPTIONS["messages"], "tools": TOOLS, "max_tokens": 400}
    status, answer = server.get("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "--tool-parser" in answer["error"]["message"]
    assert server.get("/v1/chat/completions", {**body, "tool_choice": "none"})[0] == 200


def test_ten_thousand_tools(own: Server) -> None:
    """ "10,000 tools" are too many, or too large a body."""
    many = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(10_000)]
    body = {"messages": OPTIONS["messages"], "tools": many, "tool_choice": "required"}
    assert own.get("/v1/chat/completions", body)[0] in (400, 413)
    body["tools"] = many[:1000]
    status, answer = own.get("/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"].startswith("f")


def test_variables_of_templates(own: Server) -> None:
    body = {"messages": OPTIONS["messages"], "max_tokens": 2}
    for name in ("tokenize", "a b", "chat_template"):
        status, answer = own.get(
            "/v1/chat/completions", {**body, "chat_template_kwargs": {name: True}}
        )
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


def test_the_guide_names_every_format() -> None:
    text = (ROOT / "docs/guide/tools.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) >= set(PARSERS)
