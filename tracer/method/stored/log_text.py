"""A log of torch functions as JSON, with the functions of blocks in place of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ....ir.location import Location
from ..purity.function_log import Form, FunctionLog, LogEntry, renumbered
from ..reuse.block import BlockFunction, Taken, made_numbers
from .fakes import FakeReader, FakeWriter
from .function_names import function_named, name_of
from .plain_text import (
    Damaged,
    Json,
    decoded,
    encoded,
    type_name,
    type_named,
)


def log_json(log: FunctionLog) -> Json:
    """The JSON of a log.

    Raises:
        NotStorable: something in it has no text.
    """
    return _LogWriter(log).json()


class _LogWriter:
    """Writes one log. Tensors get new numbers: the state and the inputs, then results in order."""

    def __init__(self, log: FunctionLog) -> None:
        self._log = log
        self._fakes = FakeWriter()
        self._tensors: list[Json] = []
        self._known = [*log.state, *log.inputs]
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._known)}
        self._held: list[Any] = []  # so that no other object gets the same id
        self._settings: dict[Form, int] = {}
        self._names: dict[Any, int] = {}
        self._lines: dict[Location, int] = {}

    def json(self) -> Json:
        entries: list[Json] = []
        for entry in self._log.entries:
            if isinstance(entry.function, BlockFunction):
                entries += self._of_block(entry)
            else:
                entries.append(self._entry(entry, self._own_number, entry.result))
        values, settings = self._log.ends
        ends = self._form(renumbered(values, self._own_number)), self._setting(settings)
        return {
            "functions": list(self._names),
            "settings": [[encoded(item) for item in settings] for settings in self._settings],
            "storages": self._fakes.storages,
            "tensors": self._tensors,
            "lines": [[line.file, line.line, line.function] for line in self._lines],
            "entries": entries,
            "ends": ends,
        }

    def _own_number(self, number: int) -> int:
        return self._number(self._log.tensor(number))

    def _number(self, tensor: torch.Tensor) -> int:
        """The new number of a tensor; the next one if it has none."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._numbers)
            self._held.append(tensor)
            self._tensors.append(self._fakes.json(tensor, tensor.requires_grad))
        return number

    def _of_block(self, entry: LogEntry) -> list[Json]:
        """The entries of a block, on the tensors that it takes here and on those that it makes."""
        block = entry.function.block
        taken = [self._log.tensor(number) for number in entry.arguments[0]]
        own_tensors = dict(zip(made_numbers(block.ends), entry.result, strict=True))
        positions = {id(tensor): i for i, tensor in enumerate(block.stand_ins)}
        for number, tensor in enumerate(block.stand_ins):
            if number not in own_tensors:
                own_tensors[number] = _Own(tensor)

        def number_of(number: int) -> int:
            return (
                self._number(taken[~number])
                if number < 0
                else self._own_tensor_number(own_tensors[number])
            )

        def own(value: Any) -> Any:
            if isinstance(value, Taken):
                return taken[value.position]
            if isinstance(value, torch.Tensor):
                return own_tensors[positions[id(value)]]
            return type(value)(map(own, value)) if type(value) in (tuple, list) else value

        return [self._entry(inner, number_of, own(inner.result)) for inner in block.entries]

    def _own_tensor_number(self, value: Any) -> int:
        """The number of a tensor that a block makes."""
        if not isinstance(value, _Own):
            return self._number(value)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._held.append(value)
            self._tensors.append(self._fakes.json(value.like))
        return number

    def _entry(self, entry: LogEntry, number: Any, result: Any) -> Json:
        positional, named = entry.arguments
        line = -1
        if entry.line is not None:
            line = self._lines.setdefault(entry.line, len(self._lines))
        return [
            self._names.setdefault(name_of(entry.function), len(self._names)),
            [self._form(renumbered(form, number)) for form in positional],
            [[name, self._form(renumbered(form, number))] for name, form in named],
            self._setting(entry.settings),
            line,
            encoded(result, self._reference),
        ]

    def _reference(self, value: Any) -> int | None:
        is_tensor = isinstance(value, (torch.Tensor, _Own))
        return self._own_tensor_number(value) if is_tensor else None

    def _setting(self, settings: Form) -> int:
        return self._settings.setdefault(settings, len(self._settings))

    def _form(self, form: Any) -> Json:
        """The JSON of the key of an argument, which is a value but for numbers of tensors."""
        if type(form) is int:
            return form
        kind, *parts = form
        if kind in (tuple, list, slice):
            return ["of", type_name(kind), *map(self._form, parts)]
        if kind is dict:
            pairs = ([self._form(key), self._form(value)] for key, value in parts)
            return ["dict of", *pairs]
        if kind in (float, complex):
            return ["digits", type_name(kind), *parts]
        return encoded(parts[0])


class _Own:
    """A tensor that a block makes for itself, where it runs once more."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like


def read_log(
    json: Json,
    mode: FakeTensorMode,
    state: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> FunctionLog:
    """The log of a JSON.

    Args:
        json: what `log_json` has given.
        mode: makes fakes.
        state, inputs: the fakes of the call's state and of its inputs.

    Raises:
        Damaged: it is no such JSON.
    """
    try:
        reader = FakeReader(mode, json["storages"])
        tensors = [*state, *inputs, *map(reader.fake, json["tensors"])]
        functions = list(map(function_named, json["functions"]))
        settings = [tuple(map(decoded, items)) for items in json["settings"]]
        lines = [Location(*line) for line in json["lines"]]

        def entry(row: Json) -> LogEntry:
            function, positional, named, setting, line, result = row
            arguments = (
                tuple(map(_read_form, positional)),
                tuple((name, _read_form(form)) for name, form in named),
            )
            return LogEntry(
                functions[function],
                arguments,
                settings[setting],
                decoded(result, tensors.__getitem__),
                None if line < 0 else lines[line],
            )

        values, setting = json["ends"]
        ends = _read_form(values), settings[setting]
        entries = list(map(entry, json["entries"]))
        return FunctionLog.restored(mode, state, inputs, tensors, entries, ends)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise Damaged(f"a log of functions: {error}") from error


def _read_form(json: Json) -> Any:
    if type(json) is int:
        return json
    tag, *parts = json
    if tag == "of":
        return (type_named(parts[0]), *map(_read_form, parts[1:]))
    if tag == "dict of":
        return (dict, *[(_read_form(key), _read_form(value)) for key, value in parts])
    if tag == "digits":
        return (type_named(parts[0]), *parts[1:])
    value = decoded(json)
    return (type(value), value)
