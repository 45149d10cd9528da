"""The base class of passes: small frozen dataclasses whose fields are their options.

Class variables declare a pass's name, the phases that it accepts and the phase that it leaves. The
manager checks them before any pass runs. A pass reads no environment and keeps no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import ClassVar, Self, TypeAlias, get_args, get_type_hints

from ..ir.ops.module import Module
from ..ir.phases import Phase


class OptionError(ValueError):
    """The text of a pipeline has an option that its pass does not have, or cannot read."""


@dataclass(frozen=True)
class Pass(ABC):
    """A pass, which rewrites the IR of a module in place.

    A subclass is a frozen dataclass with a default for each field. It is listed in `registry.py`,
    and its docstring shows the IR before and after.

    Attributes:
        name: in kebab-case, and unique.
        requires: the phases that it accepts.
        ensures: the phase in which it leaves the module; None: the same phase.
        optional: whether it is an optimisation, which may be switched off by name.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[Phase, ...]]
    ensures: ClassVar[Phase | None] = None
    optional: ClassVar[bool] = False

    @abstractmethod
    def run(self, module: Module) -> bool:
        """Rewrite `module`, its phase included; return whether anything changed.

        Raises:
            IRError: the program cannot be compiled; the message says where and what to do.
        """

    def remarks(self, module: Module) -> tuple[str, ...]:
        """Lines on what the pass has decided, for users, of a module behind it."""
        return ()

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Make the pass from the text of its options; other fields have their defaults.

        A pass with an option that is a Python object overrides this method, to find the object by a
        name.

        Raises:
            OptionError: an option is unknown, or its text cannot be read.
        """
        known = {field.name: field for field in fields(cls)}
        hints = _hints(cls)
        values: dict[str, object] = {}
        for key, text in options.items():
            if key not in known:
                have = ", ".join(sorted(known)) or "none"
                raise OptionError(f"pass '{cls.name}' has no option '{key}'; its options: {have}")
            values[key] = parse_option(cls.name, key, hints[key], text)
        try:
            return cls(**values)
        except ValueError as error:
            raise OptionError(f"pass '{cls.name}': {error}") from error

    @classmethod
    def describe_options(cls) -> str:
        """The options with their defaults, such as `{broadcast_from=3}`; empty without options."""
        parts = [f"{field.name}={option_text(_default(field))}" for field in fields(cls)]
        return "{" + ", ".join(parts) + "}" if parts else ""

    def __str__(self) -> str:
        """The text of the pass in a pipeline; options at their defaults are left out."""
        parts = [
            f"{field.name}={option_text(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != _default(field)
        ]
        return self.name + ("{" + ",".join(parts) + "}" if parts else "")


Pipeline: TypeAlias = tuple[Pass, ...]
"""Passes in the order in which they run."""


def parse_option(pass_name: str, key: str, hint: object, text: str) -> object:
    """Read the text of one option as the type of its field: bool, int, float or str.

    Raises:
        OptionError: the text does not fit the type, or the type has no text form.
    """
    arguments = get_args(hint)
    if type(None) in arguments and len(arguments) == 2:
        if text == "none":
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
    readers: dict[object, object] = {bool: _BOOLS.get, int: int, float: float, str: str}
    reader = readers.get(hint)
    if not callable(reader):
        raise OptionError(
            f"option '{key}' of pass '{pass_name}' has no text form; give it in Python"
        )
    try:
        value: object = reader(text)
    except ValueError:
        value = None
    if value is None:
        kind = getattr(hint, "__name__", str(hint))
        raise OptionError(f"option '{key}' of pass '{pass_name}' is of type {kind}, not '{text}'")
    return value


def option_text(value: object) -> str:
    """The text form of an option's value, which `parse_option` reads."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


_BOOLS = {"true": True, "false": False}


@cache
def _hints(cls: type[Pass]) -> Mapping[str, object]:
    """The types of a pass's options; cached, since Python evaluates their text each time."""
    return get_type_hints(cls)


def _default(field: Field[object]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
