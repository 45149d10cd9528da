"""What is written in C, if this is a compiled wheel; see docs/design/0033-compiled-modules.md."""

from __future__ import annotations

from typing import Any

native: Any
try:
    from . import _cells as native
except ImportError:  # a checkout, or a wheel of Python alone
    native = None
