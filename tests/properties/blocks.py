"""All building blocks of random models, by name."""

from __future__ import annotations

from . import layer_blocks, program_blocks
from .block import BLOCKS, LENGTH, VOCABULARY, WIDTH, Digits

__all__ = ["BLOCKS", "LENGTH", "VOCABULARY", "WIDTH", "Digits", "layer_blocks", "program_blocks"]
