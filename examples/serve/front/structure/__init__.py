"""Structured output: grammars of what requests ask for, and their check ahead of the engine."""
