"""Generated sources as JSON.

Reading a source compiles it, so it may hold nothing but what `codegen.py` writes: statements that
call operators of torch, which are looked up by name, and a few functions of cg.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from ....ir.location import Location
from ...method.joint_graph import Lines
from ...method.stored.function_names import operator_name, operator_named
from ...method.stored.graph_text import constant_json, read_constant
from ...method.stored.plain_text import Damaged, Json, decoded, encoded
from .codegen import BODY, HELPERS
from .direct_calls import call_of
from .generated_source import GeneratedSource, SettledSources

_NAMES = frozenset({BODY, "MADE", "COMPARE", "COMPARED", "is_contiguous", "contiguous"})
"""What sources name beside their globals: what a body adds to these, and methods of tensors."""

_GLOBAL = re.compile(r"G\d+|COMPUTE")
"""What the writer of sources calls globals."""


def source_json(source: GeneratedSource) -> Json:
    """The JSON of a source.

    Raises:
        NotStorable: it calls a compiled kernel, or has a constant without a text.
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
    json: Json | None,
    line_of: Lines,
    mend: Callable[[str], None],
    write: Callable[[frozenset[str]], GeneratedSource],
) -> GeneratedSource | None:
    """The source of a JSON; None if there is none, or it is damaged.

    Args:
        json: what `source_json` has given.
        line_of: gives the line of today for each of its lines.
        mend: is told how it is damaged.
        write: writes the source to run when strides have been compared.
    """
    try:
        return None if json is None else _source_of(json, line_of, mend, write)
    except (Damaged, TypeError, ValueError, KeyError, IndexError, SyntaxError) as error:
        mend(f"the code of a body is damaged: {error}")
        return None


def _source_of(
    json: Json,
    line_of: Lines,
    mend: Callable[[str], None],
    write: Callable[[frozenset[str]], GeneratedSource],
) -> GeneratedSource:
    text = str(json["text"])
    (code,) = (part for part in compile(text, "<cg>", "exec").co_consts if type(part) is CodeType)
    values: dict[str, Any] = {**HELPERS}
    operators: dict[str, torch._ops.OpOverload] = {}
    for name, (kind, content) in json["globals"]:
        if _GLOBAL.fullmatch(name) is None:
            raise Damaged(f"a source has the global {name[:80]}")
        if kind == "operator":
            operators[name] = operator_named(content)
            values[name] = call_of(operators[name])
        else:
            values[name] = read_constant(content) if kind == "tensor" else decoded(content)
    holders = tuple((str(name), int(number)) for name, number in json["holders"])
    _check(code, {**values, **dict(holders)})
    lines = [line_of(Location(*line)) for line in json["lines"]]
    places = {n: line for n, at in json["places"] if (line := lines[at]) is not None}
    settled = None
    if json["settled"] is not None:
        later = {frozenset(names): inner for names, inner in json["settled"]}

        def settle(names: frozenset[str]) -> GeneratedSource:
            source = read_source(later.get(names), line_of, mend, write)
            return write(names) if source is None else source

        settled = SettledSources(settle)
    return GeneratedSource(text, code, values, operators, holders, places, settled)


def _check(code: CodeType, values: Mapping[str, Any]) -> None:
    """Return if a function can reach nothing but some global values, constants and its arguments.

    Python keeps the names of globals, attributes and imports of a function in one place.

    Args:
        code: the function.
        values: its globals, which are none of Python's own functions.

    Raises:
        Damaged: it has other names.
    """
    others = set(code.co_names) - values.keys() - _NAMES
    if others or code.co_freevars or any(type(part) is CodeType for part in code.co_consts):
        raise Damaged(f"a source has the names {sorted(others)}")
