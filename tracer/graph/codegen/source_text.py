"""Generated sources as JSON.

Reading a source compiles it, so it may hold nothing but what `codegen.py` writes: statements that
call operators of torch, which are looked up by name, and a few functions of cg.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from ....ir.location import Location
from ...method.stored.function_names import operator_name, operator_named
from ...method.stored.graph_text import constant_json, read_constant
from ...method.stored.plain_text import Damaged, Json, decoded, encoded
from .codegen import HELPERS
from .direct_calls import call_of
from .generated_source import GeneratedSource, SettledSources

_STRING = r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\""
_TOKENS = re.compile(
    rf"(?:[ \n]++|[A-Za-z_]\w*+(?!['\"])|\d++(?:\.\d++)?(?:e[+-]?\d++)?|[()\[\]=,:;-]|{_STRING}"
    r"|\.(?:is_)?contiguous\(\))*+"
)
_STRINGS = re.compile(_STRING)
_NAMES = re.compile(r"[A-Za-z_]\w*+(?! ?=)")
"""Names, but for those that are assigned to and those of arguments."""
_KEYWORDS = {"def", "if", "not", "with", "return", "del", "None", "True", "False", "enabled"}
_REFUSED = ({*keyword.kwlist, *keyword.softkwlist, *dir(builtins)} - _KEYWORDS) | {"__builtins__"}


def source_json(source: GeneratedSource) -> Json:
    """The JSON of a source.

    Raises:
        NotStorable: it calls a compiled kernel, or holds a constant that has no text.
    """
    holders = dict(source.holders)
    values = [
        [name, _value_json(source, name, value)]
        for name, value in source.globals.items()
        if name not in HELPERS and name not in holders
    ]
    lines: dict[Location, int] = {}
    places = [[n, lines.setdefault(line, len(lines))] for n, line in source.locations.items()]
    settled = None
    if source.settled is not None:
        known = list(source.settled.known.items())
        settled = [[sorted(names), source_json(inner)] for names, inner in known]
    return {
        "text": source.text,
        "globals": values,
        "holders": source.holders,
        "lines": [[line.file, line.line, line.function] for line in lines],
        "places": places,
        "settled": settled,
    }


def _value_json(source: GeneratedSource, name: str, value: Any) -> Json:
    if name in source.operators:
        return ["operator", operator_name(source.operators[name])]
    if isinstance(value, torch.Tensor):
        return ["tensor", constant_json(value)[0]]
    return ["plain", encoded(value)]


def read_source(
    json: Json,
    lines: Mapping[Location, Location],
    write: Callable[[frozenset[str]], GeneratedSource],
) -> GeneratedSource:
    """The source of a JSON.

    Args:
        json: what `source_json` has given.
        lines: where the user's lines are now; others are dropped.
        write: writes the source to run when strides have been compared.

    Raises:
        Damaged: it is no such JSON, or the source holds something else than `codegen.py` writes.
    """
    try:
        return _source_of(json, lines, write)
    except (TypeError, ValueError, KeyError, IndexError, SyntaxError) as error:
        raise Damaged(f"a source: {error}") from error


def _source_of(
    json: Json,
    lines: Mapping[Location, Location],
    write: Callable[[frozenset[str]], GeneratedSource],
) -> GeneratedSource:
    text = str(json["text"])
    _check(text)
    (code,) = (part for part in compile(text, "<cg>", "exec").co_consts if type(part) is CodeType)
    values: dict[str, Any] = {**HELPERS}
    operators: dict[str, torch._ops.OpOverload] = {}
    for name, (kind, content) in json["globals"]:
        if kind == "operator":
            operators[name] = operator_named(content)
            values[name] = call_of(operators[name])
        else:
            values[name] = read_constant(content) if kind == "tensor" else decoded(content)
    old = [Location(*line) for line in json["lines"]]
    places = {number: lines[old[at]] for number, at in json["places"] if old[at] in lines}
    holders = tuple((str(name), int(number)) for name, number in json["holders"])
    settled = None
    if json["settled"] is not None:
        known = {frozenset(names): read_source(s, lines, write) for names, s in json["settled"]}
        settled = SettledSources(write, known)
    return GeneratedSource(text, code, values, operators, holders, places, settled)


def _check(text: str) -> None:
    """Return if a text is a function of statements as `codegen.py` writes them.

    It has no attributes of values, no imports, and no names of Python's own functions. So all that
    it can call is among its globals.

    Raises:
        Damaged: it is not.
    """
    if _TOKENS.fullmatch(text) is None or not text.startswith("def BODY("):
        raise Damaged("a source has other words than those of bodies")
    refused = _REFUSED.intersection(_NAMES.findall(_STRINGS.sub("", text)))
    if refused:
        raise Damaged(f"a source has the name {min(refused)}")
