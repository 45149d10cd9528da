"""Cut the text form into tokens.

A token is a plain string, and its first character says what kind of token it is. Positions are not
kept: for an error, the position of its one token is found again by counting. So a large file is
cheap to read. No pattern backtracks far, so the time is linear in the length of any file.
"""

from __future__ import annotations

import itertools
import re

from .diagnostics import TextSpan

_PLACE = r"@(?:\d+(?![\w.$-])|\{[\d.,\s]*\}|[A-Za-z_]\w*(?![.$-]))"
_END_OF_WORD = r"(?![\w.-])"
_TOKEN = re.compile(
    r"\s*+(?://[^\n]*+\s*+)*+("
    r"[,():=]"  # most tokens, and the beginning of no other
    r"|[%@][\w.$-]+"  # a value or a symbol
    r'|[%@]?"(?:[^"\\\n]|\\.)*+"?'  # a string, or a value or a symbol in quotes, closed or not
    r"|(?:future<){1,2}[^<>\n]*+>+"  # a future, or one of a future, which is refused later
    rf"|\w+\[[^\[\]\n]*+\](?:{_PLACE})?(?::host{_END_OF_WORD})?"  # a tensor type
    rf"|(?:object|unit){_END_OF_WORD}(?:{_PLACE})?"
    rf"|\d+[FBW]\d+{_END_OF_WORD}"  # a task
    rf"|-?(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|inf{_END_OF_WORD})"
    r"|[A-Za-z_][\w.-]*"
    r"|->|\{(?=[-.,>\s]*+\d)[-\d.,>\s]*+\}"  # the last is a set of ranks, or of pairs
    r"|\[[\d:+,\s]*\]|\{\s*\[[\[\]\d:+,\s]*\}"  # a region, or a set of regions
    r"|\{\s*\w+\s*:\s*\d[\w:,\s]*\}"  # counts by element type
    r"|\{\s*[A-Za-z_][\w.-]*\s*:\s*[a-z][\w.:,\s-]*\}"  # effects by actor
    r"|\S|\Z)"
)


def tokenize(text: str) -> list[str]:
    """All tokens of a text, without spaces and comments; at least one empty token is at the end."""
    tokens: list[str] = _TOKEN.findall(text)
    return tokens


def span_of(text: str, file: str, index: int) -> TextSpan:
    """The position of the token with this index."""
    match = next(itertools.islice(_TOKEN.finditer(text), index, None))
    position, length = match.span(1)[0], len(match.group(1))
    if not length:  # the end of the text: point behind its last token
        position = len(text.rstrip())
    return _span(text, file, position, length)


def _span(text: str, file: str, position: int, length: int) -> TextSpan:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[start : end if end >= 0 else len(text)]
    column = position - start + 1
    return TextSpan(
        file=file,
        line=text.count("\n", 0, position) + 1,
        column=column,
        length=min(length, len(line) - column + 1),
        text=line,
    )
