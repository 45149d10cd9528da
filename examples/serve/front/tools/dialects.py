"""How a model writes calls and thoughts: found in its chat template, or named by an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .deltas import OutputParser, Plain
from .harmony import Harmony
from .parsers import DeepSeek, Hermes, JsonList, Llama, Mistral, QwenCoder, Schemas
from .reasoning import BEGIN, END, Think

PARSERS: dict[str, Callable[[Schemas], OutputParser]] = {
    "hermes": Hermes,
    "qwen3_coder": QwenCoder,
    "llama3_json": Llama,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "gpt_oss": Harmony,
}
"""Formats of calls, by the names that `--tool-parser` takes."""
REASONING = ("think", "gpt_oss", "none")
"""Formats of thoughts, by the names that `--reasoning-parser` takes."""
_SIGNS = (
    (Harmony.CHANNEL, "gpt_oss"),
    ("<function=", "qwen3_coder"),
    (Hermes.BEGIN, "hermes"),
    (Mistral.BEGIN, "mistral"),
    (DeepSeek.CALLS, "deepseek"),
    (Llama.TAG, "llama3_json"),
)
"""What a template contains, and whose it is; the first that is there counts."""
_MARKS = {
    "mistral": (Mistral.BEGIN, Mistral.ARGS),
    "llama3_json": (Llama.TAG,),
    "deepseek": (
        *(DeepSeek.CALLS, DeepSeek.BEGIN, DeepSeek.SEPARATOR, DeepSeek.END, DeepSeek.ENDS),
    ),
    "hermes": (Hermes.BEGIN, Hermes.END),
    "qwen3_coder": (Hermes.BEGIN, Hermes.END),
    "gpt_oss": Harmony.MARKS,
}


@dataclass(frozen=True)
class Dialect:
    """The formats of a model.

    Attributes:
        tools: of calls; empty if the model has none that is known.
        reasoning: of thoughts: `think`, `gpt_oss`, or empty.
        has_args: whether its template writes Mistral's calls by name and `[ARGS]`.
        has_fence: whether its template writes DeepSeek's arguments in a fence.
    """

    tools: str = ""
    reasoning: str = ""
    has_args: bool = False
    has_fence: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that may be special tokens, and that parsers have to see."""
        thoughts = (BEGIN, END) if self.reasoning == "think" else ()
        harmony = Harmony.MARKS if self.reasoning == "gpt_oss" else ()
        return (*_MARKS.get(self.tools, ()), *thoughts, *harmony)

    def parser(self, schemas: Schemas | None, is_listed: bool, is_open: bool) -> OutputParser:
        """A parser of one answer.

        Args:
            schemas: of the tools that may be called; None if none may.
            is_listed: whether a grammar has made it a list of calls.
            is_open: whether the prompt has begun a thought.
        """
        parser: OutputParser = Plain()
        if is_listed:
            parser = JsonList(schemas or {})
        elif self.reasoning == "gpt_oss" or (schemas is not None and self.tools == "gpt_oss"):
            return Harmony(schemas or {})
        elif schemas is not None and self.tools:
            parser = PARSERS[self.tools](schemas)
        return Think(parser, is_open) if self.reasoning == "think" else parser


def dialect_of(template: str, tools: str | None = None, reasoning: str | None = None) -> Dialect:
    """The formats of a model.

    Args:
        template: of its chats; empty if it has none.
        tools, reasoning: names from the command line; None: what the template contains decides.
    """
    if tools is None:
        tools = next((name for sign, name in _SIGNS if sign in template), "")
    if reasoning is None:
        reasoning = "gpt_oss" if Harmony.CHANNEL in template else ""
        reasoning = "think" if END in template else reasoning
    return Dialect(
        tools,
        "" if reasoning == "none" else reasoning,
        Mistral.ARGS in template,
        "```json" in template,
    )
