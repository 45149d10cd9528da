"""The module written in C, if this is a compiled wheel (docs/design/0033-compiled-modules.md)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# A module that exists and cannot be loaded is an error: nothing falls back silently.
native: Any = import_module("._cells", __package__) if find_spec("._cells", __package__) else None
