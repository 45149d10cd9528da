"""A decorator for mypyc, which makes machine code of some modules (docs/design/0033).

This module is not compiled itself. mypyc recognises the decorator by its name alone, and Python
needs a decorator of that name even where mypyc's package is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Return a decorator that leaves its class unchanged."""
        return lambda class_: class_


__all__ = ["mypyc_attr"]
