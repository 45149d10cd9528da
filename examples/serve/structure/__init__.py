"""Texts that follow grammars: which tokens may be drawn next, by llguidance."""
