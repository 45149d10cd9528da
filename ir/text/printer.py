"""Write the text form of modules, programs and ops, which `parser.py` reads."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from typing import Any

from ..alike.alike_programs import read_programs
from ..attributes import Effect, ReduceOp, Shares, Stream, Symbol, Task, Traffic
from ..flops import Flops
from ..layout import Region, format_region
from ..location import Location
from ..ops import (
    OP_CLASSES,
    AllGatherRows,
    Assemble,
    Op,
    ReduceScatterRows,
    Reserve,
    Slice,
    Transfer,
    Value,
    attribute_names,
)
from ..ops.module import Channel, Function, FunctionKind, Module, Program, Vjp
from ..types import Mesh, Place, Type, format_ranks

_INDENT = "  "
_NAME = re.compile(r"[\w.$-]+")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_LOCATION = re.compile(
    rf" loc\({_QUOTED}:\d+(?: in (?:{_QUOTED}|{_WORD.pattern}))?\)$", re.MULTILINE
)
"""A location behind an op or a function, at the end of its line."""


def format_module(module: Module, locations: bool = False) -> str:
    """The text of a module, which lacks only weights and the bodies of functions.

    Args:
        module: a module in any phase.
        locations: whether to write the user's line behind each op and function that has one.
    """
    declarations = f"{format_declarations(module, locations)}\n"
    return "".join((declarations, *format_programs(read_programs(module), locations), "}\n"))


def without_locations(text: str) -> str:
    """The text of a module as `format_module` writes it without locations."""
    return _LOCATION.sub("", text)


def format_declarations(module: Module, locations: bool = False) -> str:
    """The text of a module up to its programs, without the last line break."""
    lines = [f"module {_symbol(module.name)} phase={module.phase} world={module.world} {{"]
    lines += [_INDENT + _mesh(mesh) for mesh in module.meshes.values()]
    lines += [_INDENT + _function(f, locations) for f in module.functions.values()]
    lines += [_INDENT + _vjp(vjp) for vjp in module.vjps.values()]
    for body in module.bodies.values():
        lines += _program(body, _OpPrinter(locations), _INDENT, "body")
    lines += [_INDENT + _channel(channel) for channel in module.channels.values()]
    return "\n".join(lines)


def format_programs(programs: Iterable[Program], locations: bool = False) -> Iterator[str]:
    """The text of each program, as it stands in the text of its module, with its line breaks."""
    printer = _OpPrinter(locations)
    for program in programs:
        yield "\n".join(_program(program, printer, _INDENT)) + "\n"


def format_program(program: Program, locations: bool = False) -> str:
    """The text of one program, as in the text of its module, but without indentation."""
    return "\n".join(_program(program, _OpPrinter(locations), "")) + "\n"


def format_op(op: Op) -> str:
    """The text of one op, on one line, without indentation."""
    return _OpPrinter(locations=False).format(op)


def format_value(value: Value) -> str:
    """The text of a value as an operand: `%h.0`."""
    return f"%{value.name}" if _NAME.fullmatch(value.name) else f"%{_quote(value.name)}"


def format_location(loc: Location) -> str:
    """The text of a location: `loc("train.py":12 in step)`."""
    where = f"{_quote(loc.file)}:{loc.line}"
    return f"loc({where} in {_string(loc.function)})" if loc.function else f"loc({where})"


def _program(
    program: Program, printer: _OpPrinter, indent: str, word: str = "program"
) -> list[str]:
    name = _symbol(program.name) if program.rank is None else f"@{program.rank}"
    params = ", ".join(f"{printer.name(p)}: {printer.type(p.type)}" for p in program.params)
    inner = indent + _INDENT
    lines = [f"{indent}{word} {name}({params}) {{"]
    lines += [inner + printer.format(op) for op in program.ops]
    lines.append(f"{indent}}}")
    return lines


class _OpPrinter:
    """Writes ops, and caches the texts of names and types."""

    def __init__(self, locations: bool) -> None:
        self._locations = locations
        self._names: dict[str, str] = {}
        self._types: dict[Type, str] = {}
        # By identity, as hashing a type costs more than writing the rest of its op. Each entry
        # keeps its type alive, so that no other type can get the same identity.
        self._types_by_id: dict[int, tuple[Type, str]] = {}

    def format(self, op: Op) -> str:
        name, type_ = self.name, self.type
        results = op.results
        text = f"{op.opcode}({', '.join([name(v) for v in op.operands])})"
        if results:
            text = f"{', '.join([name(v) for v in results])} = {text}"
        getter, prefixes, formats = _GETTERS[type(op)]
        attributes = [
            prefix + formats[type(value)](value)
            for prefix, value in zip(prefixes, getter(op), strict=True)
            if value is not None
        ]
        if attributes:
            text = f"{text} {{{', '.join(attributes)}}}"
        if results:
            text = f"{text} : {', '.join([type_(v.type) for v in results])}"
        if self._locations and op.loc is not None:
            text = f"{text} {format_location(op.loc)}"
        return text

    def name(self, value: Value) -> str:
        text = self._names.get(value.name)
        if text is None:
            text = format_value(value)
            self._names[value.name] = text
        return text

    def type(self, type_: Type) -> str:
        known = self._types_by_id.get(id(type_))
        if known is not None:
            return known[1]
        text = self._types.setdefault(type_, str(type_))
        self._types_by_id[id(type_)] = (type_, text)
        return text


def _mesh(mesh: Mesh) -> str:
    axes = "".join(f"{axis} = {size}, " for axis, size in mesh.grid)
    return f"mesh {_symbol(mesh.name)} {{{axes}ranks = {format_ranks(mesh.ranks)}}}"


def _function(function: Function, locations: bool) -> str:
    inputs = ", ".join(map(str, function.inputs))
    outputs = ", ".join(map(str, function.outputs))
    text = f"function {_symbol(function.name)}({inputs}) -> ({outputs})"
    text = f"{text} {_declared(function, {'name', 'inputs', 'outputs', 'loc'})}"
    if locations and function.loc is not None:
        text = f"{text} {format_location(function.loc)}"
    return text


def _vjp(vjp: Vjp) -> str:
    return f"vjp {_symbol(vjp.name)} {_declared(vjp, {'name'})}"


def _channel(channel: Channel) -> str:
    return f"channel {channel.id} {_declared(channel, {'id'})}"


def _declared(declaration: Function | Vjp | Channel, skip: set[str]) -> str:
    """The attributes of a declaration that are present, sorted by name."""
    attributes = []
    for f in sorted(fields(declaration), key=attrgetter("name")):
        value = getattr(declaration, f.name)
        if f.name not in skip and not _is_absent(f, value):
            is_function = isinstance(declaration, Vjp) and isinstance(value, str)
            text = _symbol(value) if is_function else _FORMATS[type(value)](value)
            attributes.append(f"{f.name} = {text}")
    return f"{{{', '.join(attributes)}}}"


def _is_absent(field: Field[Any], value: Any) -> bool:
    """True if a field holds its default, and the default is empty or false."""
    return field.default is not MISSING and value == field.default and not value


def _symbol(name: str) -> str:
    return f"@{name}" if _NAME.fullmatch(name) else f"@{_quote(name)}"


def _string(text: str) -> str:
    return text if _WORD.fullmatch(text) else _quote(text)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tuple(value: Iterable[Any]) -> str:
    items = tuple(value)
    if items and isinstance(items[0], tuple):
        return "{" + ", ".join(f"{output} -> {input_}" for output, input_ in items) + "}"
    return format_ranks(items)


def _enum(value: enum.Enum) -> str:
    return str(value.value)


_FORMATS: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",
    int: str,
    float: repr,
    str: _string,
    tuple: _tuple,
    Symbol: lambda value: _symbol(value.name),
    Place: lambda value: format_ranks(value.ranks),
    Task: str,
    Flops: str,
    Shares: str,
    Stream: _enum,
    ReduceOp: _enum,
    Traffic: _enum,
    Effect: _enum,
    FunctionKind: _enum,
}


def _regions(regions: tuple[Region, ...]) -> str:
    return "{" + ", ".join(map(format_region, regions)) + "}"


_REGIONS: dict[type[Op], dict[type, Callable[[Any], str]]] = {
    Slice: {tuple: format_region},
    Reserve: {tuple: _regions},
    Assemble: {tuple: _regions},
    Transfer: {tuple: _regions},
    AllGatherRows: {tuple: _regions},
    ReduceScatterRows: {tuple: _regions},
}
"""The ops whose tuples are regions."""

_GETTERS: dict[
    type[Op],
    tuple[Callable[[Op], tuple[Any, ...]], tuple[str, ...], dict[type, Callable[[Any], str]]],
] = {
    cls: (
        attrgetter(*attribute_names(cls)),
        tuple(f"{name} = " for name in attribute_names(cls)),
        _FORMATS | _REGIONS.get(cls, {}),
    )
    for cls in OP_CLASSES.values()
}
