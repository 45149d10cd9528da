"""Fields that ask for a structure, as grammars of llguidance.

OpenAI's is `response_format`, vLLM's are `structured_outputs` and the older fields beside it. A
request has one of them at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import fields
from ..errors import ApiError, bad
from ..fields import Body

Rule = Mapping[str, Any]
"""A grammar by itself: `json_schema`, `lark_grammar` or `gbnf`, with its value."""

WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the tokens of JSON. Without a bound a model could write nothing else."""
OBJECT = {"type": "object"}
CHOSEN = 4096
"""Strings of a choice, at most."""
FIELDS = {
    *("structured_outputs", "response_format", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar"),
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = {"whitespace_pattern", "disable_any_whitespace"}


def rule_of(body: Body) -> Rule | None:
    """The structure that a body asks for; None: any text.

    Raises:
        ApiError: 400, for a field that is no such structure, or several of them.
    """
    rules = {name: _READERS[name](body, name) for name in FIELDS if body.get(name) is not None}
    wanted = {name: rule for name, rule in rules.items() if rule is not None}
    if len(wanted) > 1:
        bad(f"give one of {', '.join(sorted(wanted))}", max(wanted))
    return next(iter(wanted.values()), None)


def grammar(rule: Rule) -> str:
    """A rule as a grammar for llguidance."""
    return joined([{"name": "main", "lark_grammar": "start: @answer"}, {"name": "answer", **rule}])


def joined(grammars: Sequence[Mapping[str, Any]]) -> str:
    """Grammars with names, of which the first begins, as one for llguidance.

    Raises:
        ApiError: 400, for a schema that is nested too deeply.
    """
    try:
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    except RecursionError:
        raise ApiError(400, "the schema is nested too deeply") from None


def of_schema(schema: object, param: str, whitespace: str | None = WHITESPACE) -> Rule:
    """JSON that a schema describes.

    Args:
        schema: an object or a boolean, or the text of one.
        whitespace: a pattern of what may stand between tokens; None: nothing.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except RecursionError:
            bad(f"{param} is nested too deeply", param)
        except ValueError as error:
            bad(f"{param} is not valid JSON: {error}"[:300], param)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        bad(f"{param} must be a JSON schema", param)
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        bad(f"x-guidance of {param} must be an object", param)
    options: dict[str, Any] = {}
    if not own.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        is_free = whitespace is not None
        options = {"whitespace_pattern": whitespace} if is_free else {"whitespace_flexible": False}
    return {"json_schema": {**schema, "x-guidance": {**options, **own}}}


def of_regex(pattern: str) -> Rule:
    """A text that a regular expression matches as a whole."""
    escaped, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            character = "\\/"
        elif character == "\n":
            character = "n" if is_escaped else "\\n"
        escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return {"lark_grammar": f"start: /{''.join(escaped)}/"}


def of_choice(texts: list[str]) -> Rule:
    """One of several texts."""
    return {"lark_grammar": "start: " + " | ".join(map(literal, texts))}


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def of_grammar(text: str) -> Rule:
    """A grammar of Lark, or of llama.cpp's GBNF, whose rules are written `name ::= …`."""
    return {"gbnf" if "::=" in text else "lark_grammar": text}


# -- fields ----------------------------------------------------------------------------------------


def _response_format(body: Body, name: str) -> Rule | None:
    chosen = fields.mapping(body, name)
    kind = chosen.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return of_schema(OBJECT, name)
    if kind != "json_schema":
        bad(f"{name}.type must be text, json_object or json_schema", name)
    described = fields.mapping(chosen, "json_schema")
    return of_schema(described.get("schema", True), name)


def _structured_outputs(body: Body, name: str) -> Rule | None:
    asked = {key: value for key, value in fields.mapping(body, name).items() if value is not None}
    unknown = [
        key
        for key, value in asked.items()
        if key not in _KINDS and key not in _OPTIONS and value is not False
    ]
    if unknown:
        bad(f"{name}.{unknown[0][:100]} is not supported", name)
    kinds = [key for key in _KINDS if asked.get(key, False) is not False]
    if len(kinds) != 1:
        bad(f"{name} must have one of {', '.join(_KINDS)}", name)
    whitespace: str | None = fields.string(asked, "whitespace_pattern", WHITESPACE)
    if fields.boolean(asked, "disable_any_whitespace"):
        whitespace = None
    if kinds == ["json_object"]:
        return of_schema(OBJECT, name, whitespace)
    return _of_kind(kinds[0], asked[kinds[0]], f"{name}.{kinds[0]}", whitespace)


def _guided(body: Body, name: str) -> Rule | None:
    return _of_kind(name.removeprefix("guided_"), body[name], name, WHITESPACE)


def _of_kind(kind: str, value: object, param: str, whitespace: str | None) -> Rule:
    if kind == "json":
        return of_schema(value, param, whitespace)
    if kind == "choice":
        is_list = isinstance(value, list) and 0 < len(value) <= CHOSEN
        if not is_list or not all(isinstance(text, str) for text in value):
            bad(f"{param} must be a list of 1 to {CHOSEN} strings", param)
        return of_choice(value)
    if not isinstance(value, str) or not value:
        bad(f"{param} must be a string", param)
    return of_regex(value) if kind == "regex" else of_grammar(value)


_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{name: _guided for name in FIELDS if name.startswith("guided_")},
}
