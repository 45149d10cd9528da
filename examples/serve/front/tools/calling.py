"""Grammars of calls, in the format of each model, and of thoughts ahead of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import bad
from ..structure import formats
from ..structure.formats import Rule, literal
from .dialects import Dialect
from .harmony import Harmony
from .parsers import DeepSeek, Hermes, Mistral
from .reasoning import BEGIN, END
from .toolset import Function, Toolset

ANY = "/(?s:.*)/"


class Writer:
    """Writes the grammar of an answer.

    Args:
        dialect: of the model.
        special: gives the number of a special token, or None for what is none.
    """

    def __init__(self, dialect: Dialect, special: Callable[[str], int | None]) -> None:
        self._dialect, self._special = dialect, special
        self._lines: list[str] = []
        self._grammars: list[Mapping[str, Any]] = []

    def answer(self, rule: Rule | None, tools: Toolset | None, is_open: bool) -> str:
        """The grammar of an answer that has a structure, or calls tools.

        Args:
            rule: the structure, if there is one.
            tools: that may be called, or one of which has to be.
            is_open: whether the prompt has begun a thought.
        """
        ways = []
        if tools is not None:
            self._write_calls(tools)
            ways.append("calls")
        if rule is not None and not (tools is not None and tools.is_forced):
            self._grammars.append({"name": "answer", **rule})
            ways.append(self._final("@answer"))
        elif tools is not None and not tools.is_forced:
            ways = [self._calls_in_text(tools)]
        start = f"start: {self._thought(is_open)} body"
        lines = [start, f"body: {' | '.join(ways)}", f"TEXT: {ANY}", *self._lines]
        main = {"name": "main", "lark_grammar": "\n".join(lines)}
        return formats.joined([main, *self._grammars])

    # -- around answers ----------------------------------------------------------------------------

    def _mark(self, text: str) -> str:
        """A marker in Lark: a special token by its number, anything else as text."""
        number = self._special(text)
        return literal(text) if number is None else f"<[{number}]>"

    def _until(self, name: str, mark: str) -> str:
        """A rule for any text up to a marker, with it."""
        number = self._special(mark)
        if number is None:
            self._lines.append(f"{name}[lazy]: TEXT {literal(mark)}")
        else:
            self._lines.append(f"{name}: {ANY} <[{number}]>")
        return name

    def _thought(self, is_open: bool) -> str:
        if self._dialect.reasoning == "think":
            self._lines.append(r"gap: /[ \n]{0,4}/")
            thought = f"{self._until('thought', END)} gap"
            return thought if is_open else f"({self._mark(BEGIN)} {thought})?"
        if self._is_harmony:
            channel, message = self._mark(Harmony.CHANNEL), self._mark(Harmony.MESSAGE)
            thought = self._until("thought", Harmony.END)
            again = f'{self._mark(Harmony.START)} "assistant"'
            return f'({channel} "analysis" {message} {thought} {again})?'
        return ""

    @property
    def _is_harmony(self) -> bool:
        return self._dialect.reasoning == "gpt_oss" or self._dialect.tools == "gpt_oss"

    def _final(self, answer: str) -> str:
        if not self._is_harmony:
            return answer
        return f'{self._mark(Harmony.CHANNEL)} "final" {self._mark(Harmony.MESSAGE)} {answer}'

    def _calls_in_text(self, tools: Toolset) -> str:
        """Any text in which calls are valid."""
        if self._is_harmony:
            return f"calls | {self._final(ANY)}"
        if self._dialect.tools == "llama3_json":
            return r"calls | /([^\s{<](?s:.*))?/"
        begin = {"mistral": Mistral.BEGIN, "deepseek": DeepSeek.CALLS}
        mark = begin.get(self._dialect.tools, Hermes.BEGIN)
        self._lines.append("rest: TEXT?")
        number = self._special(mark)
        if number is None:
            self._lines.append(f"opening[lazy]: TEXT {literal(mark)}")
        else:
            self._lines.append(f"opening: TEXT <[{number}]>")
        return "(opening opened)* rest" if tools.parallel else "(opening opened)? rest"

    # -- calls -------------------------------------------------------------------------------------

    def _write_calls(self, tools: Toolset) -> None:
        """Write the rules `calls`, of one or several, and `opened`, of one behind its marker."""
        write = {
            "hermes": self._hermes,
            "qwen3_coder": self._qwen_coder,
            "llama3_json": self._llama,
            "mistral": self._mistral,
            "deepseek": self._deepseek,
            "gpt_oss": self._harmony,
        }.get(self._dialect.tools, self._list)
        write(tools.callable, tools.parallel)

    def _alternatives(
        self, functions: Sequence[Function], call: Callable[[Function, str], str]
    ) -> None:
        """Write the rule `one`: a call of any of the tools."""
        for number, function in enumerate(functions):
            name = f"args{number}"
            rule = formats.of_schema(function.parameters, "tools")
            self._grammars.append({"name": name, **rule})
            self._lines.append(f"one{number}: {call(function, f'@{name}')}")
        self._lines.append("one: " + " | ".join(f"one{n}" for n in range(len(functions))))

    def _objects(self, functions: Sequence[Function], key: str) -> None:
        def call(function: Function, arguments: str) -> str:
            head = f'{{"name": "{function.name}", "{key}": '
            return f'{literal(head)} {arguments} "}}"'

        self._alternatives(functions, call)

    def _several(self, one: str, between: str, parallel: bool) -> str:
        return f"{one} ({between} {one})*" if parallel else one

    def _hermes(self, functions: Sequence[Function], parallel: bool) -> None:
        self._objects(functions, "arguments")
        begin, end = self._mark(Hermes.BEGIN), self._mark(Hermes.END)
        self._lines.append(f'opened: "\\n" one "\\n" {end}')
        self._lines.append(f"calls: {self._several(f'{begin} opened', literal(chr(10)), parallel)}")

    def _list(self, functions: Sequence[Function], parallel: bool) -> None:
        self._objects(functions, "parameters")
        self._lines.append(f'calls: "[" {self._several("one", literal(", "), parallel)} "]"')

    def _llama(self, functions: Sequence[Function], parallel: bool) -> None:
        self._objects(functions, "parameters")
        self._lines.append("calls: one")

    def _mistral(self, functions: Sequence[Function], parallel: bool) -> None:
        begin = self._mark(Mistral.BEGIN)
        if self._dialect.has_args:
            mark = self._mark(Mistral.ARGS)
            self._alternatives(
                functions, lambda function, args: f"{literal(function.name)} {mark} {args}"
            )
            self._lines += ["opened: one", f"calls: ({begin} one)" + ("+" if parallel else "")]
            return
        self._objects(functions, "arguments")
        self._lines.append(f'opened: "[" {self._several("one", literal(", "), parallel)} "]"')
        self._lines.append(f"calls: {begin} opened")

    def _deepseek(self, functions: Sequence[Function], parallel: bool) -> None:
        begin, end, separator = map(self._mark, (DeepSeek.BEGIN, DeepSeek.END, DeepSeek.SEPARATOR))

        def call(function: Function, arguments: str) -> str:
            if not self._dialect.has_fence:
                return f"{begin} {literal(function.name)} {separator} {arguments} {end}"
            head = literal(f"{function.name}\n```json\n")
            return f'{begin} "function" {separator} {head} {arguments} "\\n```" {end}'

        self._alternatives(functions, call)
        between = literal("\n") if self._dialect.has_fence else ""
        calls = self._several("one", between, parallel)
        self._lines.append(f"opened: {calls} {self._mark(DeepSeek.ENDS)}")
        self._lines.append(f"calls: {self._mark(DeepSeek.CALLS)} opened")

    def _harmony(self, functions: Sequence[Function], parallel: bool) -> None:
        channel, message, constrain = map(
            self._mark, (Harmony.CHANNEL, Harmony.MESSAGE, Harmony.CONSTRAIN)
        )

        def call(function: Function, arguments: str) -> str:
            head = literal(f"commentary to=functions.{function.name} ")
            return f'{channel} {head} {constrain} "json" {message} {arguments}'

        self._alternatives(functions, call)
        self._lines.append("calls: one")

    def _qwen_coder(self, functions: Sequence[Function], parallel: bool) -> None:
        begin, end = self._mark(Hermes.BEGIN), self._mark(Hermes.END)
        for number, function in enumerate(functions):
            parts = [
                self._parameter(number, *numbered) for numbered in enumerate(_parameters(function))
            ]
            head = literal(f"<function={function.name}>\n")
            self._lines.append(f'one{number}: {head} {" ".join(parts)} "</function>\\n"')
        self._lines.append("one: " + " | ".join(f"one{n}" for n in range(len(functions))))
        self._lines.append(f'opened: "\\n" one {end}')
        self._lines.append(f"calls: {self._several(f'{begin} opened', literal(chr(10)), parallel)}")

    def _parameter(self, number: int, place: int, part: tuple[str, Any, bool]) -> str:
        """A parameter of a tool as plain text between tags."""
        key, schema, is_required = part
        name, close = f"value{number}_{place}", "\n</parameter>\n"
        head = literal(f"<parameter={key}>\n")
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        if is_text and not schema.keys() & {"enum", "const", "pattern", "format"}:
            self._lines.append(f"{name}[lazy]: TEXT {literal(close)}")
        elif is_text and "enum" in schema:
            texts = " | ".join(literal(str(text) + close) for text in schema["enum"])
            self._lines.append(f"{name}: {texts}")
        else:
            self._grammars.append({"name": f"{name}_json", **formats.of_schema(schema, "tools")})
            self._lines.append(f"{name}: @{name}_json {literal(close)}")
        return f"{head} {name}" if is_required else f"({head} {name})?"


def _parameters(function: Function) -> list[tuple[str, Any, bool]]:
    """The name and the schema of each parameter, and whether it is required."""
    properties = function.parameters.get("properties", {})
    required = function.parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        bad(f"the parameters of {function.name} are no schema of an object", "tools")
    shared = {
        key: function.parameters[key]
        for key in ("$defs", "definitions")
        if key in function.parameters
    }
    return [
        (key, {**schema, **shared} if isinstance(schema, dict) else schema, key in required)
        for key, schema in properties.items()
    ]
