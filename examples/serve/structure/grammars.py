"""Bounds on grammars, and what llguidance says of those that it does not take."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(verbose_errors=False)
"""Its usual limits of a step: some 15 ms for the lexer, and some 3 ms for the parser."""
SHOWN = 400
"""Characters of a reason."""


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a text; `reason` says whether it takes the grammar."""
    return LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)


def reason(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on; empty if it can."""
    return matcher.get_error().strip()[:SHOWN] if matcher.is_error() else ""
