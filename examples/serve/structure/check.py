"""A process that compiles grammars, so that one that takes too much takes this process alone.

    python -m examples.serve.structure.check

Its input has a line of JSON for the vocabulary, `[tokenizer, size, ids that end a text]`, then one
for each grammar. For each it writes a line, `[grammar, reason]`: the grammar in the form that rank
0 takes, and why it is not taken, or nothing.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from .grammars import compiled, reason
from .vocabulary import vocabulary

MEMORY = 1 << 30
"""Bytes of address space beside those of the vocabulary."""
STACK = 4 << 20
"""Bytes of a thread's stack: fewer than on rank 0, so a grammar that nests too deeply ends here."""


def checked(tokens: LLTokenizer, grammar: str) -> tuple[str, str]:
    """A grammar with those of llama.cpp translated, and why it is not taken; empty if it is."""
    try:
        grammar = translated(grammar)
    except Exception as error:  # of a parser of others' grammars
        return grammar, f"the grammar cannot be read: {error}"
    matcher: LLMatcher = compiled(tokens, grammar)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    return grammar, reason(matcher)


def translated(grammar: str) -> str:
    """A grammar whose parts of `gbnf` are of Lark."""
    if '"gbnf"' not in grammar:
        return grammar
    whole: dict[str, Any] = json.loads(grammar)
    for part in whole["grammars"]:
        if "gbnf" in part:
            part["lark_grammar"] = gbnf_to_lark(part.pop("gbnf"))
    return json.dumps(whole, ensure_ascii=False)


def main() -> None:
    """Check grammars until the input ends."""
    tokenizer, size, eos = json.loads(sys.stdin.readline())
    tokens = vocabulary(tokenizer, size, eos)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(checked(tokens, json.loads(line))), flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
