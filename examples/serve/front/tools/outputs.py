"""How the answer of a chat is written and read: its grammar, and the parser of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import bad
from ..fields import Body
from ..structure import formats
from ..text import Text
from . import reasoning
from .calling import Writer
from .deltas import OutputParser
from .dialects import Dialect
from .toolset import Toolset


@dataclass(frozen=True)
class Output:
    """The output of a text.

    Attributes:
        grammar: that it has to follow, as llguidance takes it; empty: none.
        field: of the body that the grammar is made of.
        parser: makes what reads calls and thoughts; None: there are none.
        kept: names of special tokens that the parser has to see.
    """

    grammar: str = ""
    field: str = ""
    parser: Callable[[], OutputParser] | None = None
    kept: tuple[str, ...] = ()


def output_of_completion(body: Body) -> Output:
    """The output of a completion, which calls no tools."""
    rule = formats.rule_of(body)
    return Output() if rule is None else Output(formats.grammar(rule), _field(body, rule))


def output_of_chat(
    body: Body, tools: Toolset | None, text: Text, dialect: Dialect, prompt: Sequence[int]
) -> Output:
    """The output of a chat.

    Raises:
        ApiError: 400, for tools or a structure that cannot be followed.
    """
    rule = formats.rule_of(body)
    _, begun, behind = text.ending(prompt).rpartition(reasoning.BEGIN)
    is_open = bool(begun) and reasoning.END not in behind
    is_listed = tools is not None and tools.is_forced and not dialect.tools
    needs_grammar = tools is not None and (tools.is_forced or tools.is_strict)
    grammar = ""
    if rule is not None or needs_grammar:
        grammar = Writer(dialect, text.special).answer(rule, tools, is_open)
    if tools is None and not dialect.reasoning:
        return Output(grammar, _field(body, rule))
    schemas = None if tools is None else tools.schemas
    return Output(
        grammar,
        _field(body, rule),
        lambda: dialect.parser(schemas, is_listed, is_open),
        dialect.marks,
    )


def check_known(tools: Toolset | None, dialect: Dialect) -> None:
    """Refuse tools that a model may call, if nobody knows how it would write that.

    Raises:
        ApiError: 400.
    """
    if tools is not None and not tools.is_forced and not dialect.tools:
        bad(
            "the chat template of this model shows no calls of a known format: "
            "start the server with --tool-parser, or give tool_choice required or a name",
            "tools",
        )


def _field(body: Body, rule: formats.Rule | None) -> str:
    """The field that a grammar is made of."""
    if rule is None:
        return "tools"
    names = sorted(formats.FIELDS)
    return next(name for name in names if body.get(name) not in (None, {"type": "text"}))
