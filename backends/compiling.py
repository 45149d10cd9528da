"""A decorator for mypyc, which makes machine code of some modules (docs/design/0033).

It is not compiled itself: mypyc knows the decorator by its name, and Python needs something that
has one, whether or not mypyc's own package is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Leaves a class as it is."""
        return lambda class_: class_


__all__ = ["mypyc_attr"]
