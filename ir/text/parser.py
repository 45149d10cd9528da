"""Read the text form: `parse_module(format_module(m)) == m`.

The parser is driven by the dataclasses of ops and declarations: the annotation of a field says how
its attribute is read, and the default says whether it may be left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from ..location import Location
from ..ops import Op, Value
from ..ops.module import Channel, Function, Module, Program, Vjp
from ..phases import Phase
from ..types import FutureType, Mesh, Type, ValueType
from . import literals
from .diagnostics import Diagnostic, IRError
from .known_attributes import CHANNEL, FUNCTION, OPS, VJP, KnownAttributes, symbol_name
from .lexer import span_of, tokenize
from .literals import Reader
from .printed_programs import NotPrinted, PrintedOps, split_module, split_programs

T = TypeVar("T")


def parse_module(text: str, file: str = "<text>") -> Module:
    """Read one module.

    Args:
        text: a module in the form that `format_module` writes; comments begin with `//`, and line
            breaks may be anywhere.
        file: the name of the text in errors.

    Raises:
        IRError: the text is malformed, or uses a value before its definition. The error has the
            line and column. It does not check the rules of the IR, as `verify` does.
    """
    with suppress(NotPrinted, IRError, ValueError):  # the tokens say what is wrong
        declarations, programs = split_module(text)
        parser = _Parser(f"{declarations}}}", file)
        module = parser.whole(parser.module())
        parser.printed_programs(programs, module)
        return module
    return parse_tokens(text, file)


def parse_tokens(text: str, file: str = "<text>") -> Module:
    """Read one module token by token, whatever its lines are; as `parse_module` does otherwise."""
    parser = _Parser(text, file)
    module = parser.module()
    if parser.token:
        parser.fail("text goes on behind the module", "put one module in a file")
    return module


def parse_program(text: str, module: Module, file: str = "<text>") -> Program:
    """Read one program as it stands in the text of a module.

    Args:
        text: the program.
        module: has the declarations of the module; the program is not added to it.
        file: as in `parse_module`.

    Raises:
        IRError: as `parse_module` raises it.
    """
    with suppress(NotPrinted, IRError, ValueError):
        parser = _Parser("", file, module.meshes)
        parser.printed_programs(text, module)
        (program,) = parser.programs
        return program
    parser = _Parser(text, file, module.meshes)
    parser.expect_word("program", "a program starts with `program @0(`")
    parser.program(module)
    if parser.token:
        parser.fail("text goes on behind the program")
    return parser.programs[0]


class _Parser:
    """A recursive descent parser over tokens.

    Attributes:
        token: the next one to read.
        programs: those that were read so far.
    """

    def __init__(self, text: str, file: str, meshes: dict[str, Mesh] | None = None) -> None:
        self._file = file
        self.feed(text)
        self.programs: list[Program] = []
        self._types: dict[str, Type] = {}
        self._literals: dict[tuple[Reader, str], Any] = {}
        self._values: dict[str, Value] = {}
        self._meshes = {} if meshes is None else meshes

    # -- tokens

    def feed(self, text: str) -> None:
        """Go on with another text."""
        self._text = text
        self._tokens = tokenize(text)
        self._position = 0
        self.token = self._tokens[0]

    def whole(self, value: T) -> T:
        """A value that was read, if nothing stands behind it."""
        if self.token:
            raise NotPrinted
        return value

    def fail(self, message: str, help: str = "", back: int = 0) -> NoReturn:
        """Raise about the next token, or about the one `back` tokens before it."""
        span = span_of(self._text, self._file, self._position - back)
        raise IRError(Diagnostic(message, help=help, span=span))

    def next(self) -> str:
        token = self.token
        if token:  # there is nothing behind the end of the text
            self._position += 1
            self.token = self._tokens[self._position]
        return token

    def accept(self, token: str) -> bool:
        if self.token != token:
            return False
        self.next()
        return True

    def expect(self, token: str, after: str) -> None:
        if self.token != token:
            actual = f"'{self.token}'" if self.token else "the end of the text"
            self.fail(f"expected '{token}' after {after}, found {actual}")
        self.next()

    def read(self, reader: Reader, name: str) -> Any:
        """The value of the next token; `name` names it in errors."""
        token = self.token
        if token == "{" and self._tokens[self._position + 1] == "}":
            self.next()
            token = "{}"
        key = reader, token
        if key not in self._literals:
            try:
                self._literals[key] = reader(token)
            except ValueError as problem:
                self.fail(f"{name}: {problem}" if token else f"the text ends before {name}")
        self.next()
        return self._literals[key]

    # -- the module and its declarations

    def module(self) -> Module:
        self.expect_word("module", "a module starts with `module @name phase=... world=... {`")
        name = self.read(symbol_name, "the module's name")
        self.header("phase")
        phase = self.read(literals.reader_for(Phase), "the module's phase")
        self.header("world")
        world = self.read(literals.parse_world, "the module's world")
        self.expect("{", "the module's header")
        module = Module(name, phase, world, self._meshes, programs=self.programs)
        readers = {
            "mesh": self.mesh,
            "function": self.function,
            "vjp": self.vjp,
            "body": self.body,
            "channel": self.channel,
            "program": self.program,
        }
        while not self.accept("}"):
            if self.token not in readers:
                self.fail(
                    f"'{self.token}' is no declaration"
                    if self.token
                    else "the module is not closed",
                    f"write one of {', '.join(readers)}, or }} to close the module",
                )
            readers[self.next()](module)
        return module

    def expect_word(self, word: str, help: str) -> None:
        if not self.accept(word):
            self.fail(f"expected '{word}'", help)

    def header(self, field: str) -> None:
        self.expect_word(field, "write `module @name phase=traced world=2 {`")
        self.expect("=", field)

    def mesh(self, module: Module) -> None:
        name = self.read(symbol_name, "the mesh's name")
        self.unique(name, module.meshes, "mesh")
        ranks: tuple[int, ...] | None = None
        grid: list[tuple[str, int]] = []
        self.expect("{", "the mesh's name")
        while ranks is None:
            axis = self.next()
            self.expect("=", axis or "the mesh's name")
            if axis == "ranks":
                ranks = self.read(literals.parse_ranks, "the mesh's ranks")
            else:
                grid.append((axis, self.read(literals.parse_int, f"the size of axis {axis}")))
                self.expect(",", "an axis")
        self.expect("}", "the mesh's ranks")
        try:
            module.meshes[name] = Mesh(ranks, name, tuple(grid))
        except ValueError as problem:
            self.fail(str(problem), "the sizes of the axes multiply to the number of ranks", back=1)

    def function(self, module: Module) -> None:
        name = self.read(symbol_name, "the function's name")
        self.unique(name, module.functions, "function")
        inputs = self.signature("the function's name")
        self.expect("->", "the function's inputs")
        outputs = self.signature("'->'")
        attributes = self.attributes(FUNCTION, "function")
        function = Function(name, inputs, outputs, loc=self.location(), **attributes)
        module.functions[name] = function

    def signature(self, after: str) -> tuple[ValueType, ...]:
        self.expect("(", after)
        types: list[ValueType] = []
        while not self.accept(")"):
            if types:
                self.expect(",", "a type")
            type_ = self.type()
            if isinstance(type_, FutureType):
                self.fail("a function neither takes nor returns a future", back=1)
            types.append(type_)
        return tuple(types)

    def vjp(self, module: Module) -> None:
        name = self.read(symbol_name, "the vjp's name")
        self.unique(name, module.vjps, "vjp")
        module.vjps[name] = Vjp(name, **self.attributes(VJP, "vjp"))

    def channel(self, module: Module) -> None:
        id_ = self.read(literals.parse_int, "the channel's number")
        self.unique(id_, module.channels, "channel")
        module.channels[id_] = Channel(id_, **self.attributes(CHANNEL, "channel"))

    def unique(self, name: object, table: dict[Any, Any], kind: str) -> None:
        if name in table:
            self.fail(f"{kind} {name} is declared twice", back=1)

    # -- programs and ops

    def program(self, module: Module) -> None:
        name = self.read(symbol_name, "the program's name")
        rank = None
        if module.phase is Phase.SCHEDULED:
            if not name.isdigit():
                self.fail(f"program @{name} is not named by a rank", "write @0", back=1)
            name, rank = module.name, int(name)
        self.programs.append(self.ops_of(Program(name, rank=rank)))

    def body(self, module: Module) -> None:
        name = self.read(symbol_name, "the name of the body's function")
        self.unique(name, module.bodies, "body")
        module.bodies[name] = self.ops_of(Program(name))

    def printed_programs(self, text: str, module: Module) -> None:
        """Read programs with an op on each line.

        Raises:
            NotPrinted: they are written in another way.
        """
        printed = PrintedOps(self._part_attributes, self._part_types)
        for head, lines in split_programs(text):
            self.feed(f"{head}}}")
            self.expect_word("program", "write `program @0(`")
            self.program(module)
            printed.read(lines, self.whole(self.programs[-1]))

    def _part_attributes(self, opcode: str, text: str) -> tuple[type[Op], dict[str, Any]]:
        self.feed(f"{opcode} {text}")
        cls, known = self.opcode()
        return cls, self.whole(self.attributes(known, opcode))

    def _part_types(self, text: str) -> Sequence[Type]:
        self.feed(text)
        types = [self.type()]
        while self.accept(","):
            types.append(self.type())
        return self.whole(types)

    def ops_of(self, program: Program) -> Program:
        """Read parameters and ops into a program."""
        self._values = {}
        self.expect("(", "the program's name")
        while not self.accept(")"):
            if program.params:
                self.expect(",", "a parameter")
            value = self.define()
            self.expect(":", "a parameter's name")
            value.type = self.type()
            program.params.append(value)
        self.expect("{", "the program's parameters")
        while not self.accept("}"):
            program.ops.append(self.op())
        return program

    def op(self) -> Op:
        results: list[Value] = []
        if self.token[:1] == "%":
            results.append(self.define())
            while self.accept(","):
                results.append(self.define())
            self.expect("=", "an op's results")
        cls, known = self.opcode()
        opcode = cls.opcode
        operands = self.operands(opcode)
        attributes = self.attributes(known, opcode)
        if results:
            self.result_types(results, opcode)
        elif self.token == ":":
            self.fail(f"a type stands behind {opcode}, which has no result", "write `%name = `")
        return cls(operands, tuple(results), loc=self.location(), **attributes)

    def opcode(self) -> tuple[type[Op], KnownAttributes]:
        entry = OPS.get(self.token)
        if entry is None:
            if not self.token:
                self.fail("the program is not closed", "end the program and the module with }")
            self.fail(f"'{self.token}' is no op", _suggest(self.token, OPS))
        self.next()
        return entry

    def operands(self, opcode: str) -> tuple[Value, ...]:
        self.expect("(", opcode)
        if self.accept(")"):
            return ()
        operands = [self.use()]
        while not self.accept(")"):
            self.expect(",", "an operand")
            operands.append(self.use())
        return tuple(operands)

    def result_types(self, results: list[Value], opcode: str) -> None:
        self.expect(":", f"{opcode}, which has results")
        for index, value in enumerate(results):
            if index:
                self.expect(",", f"type {index} of {len(results)}")
            value.type = self.type()
        if self.token == ",":
            self.fail(f"more types than the {len(results)} results of {opcode}")

    def define(self) -> Value:
        """A new value, whose type follows later in the text."""
        token = self.token
        if token in self._values:
            self.fail(f"{token} is defined twice", "give it another name")
        if token[:1] != "%":
            self.fail(f"expected a value such as %x, found '{token}'")
        value = Value(self.read(literals.parse_name, "a value"), _UNKNOWN)
        self._values[token] = value
        return value

    def use(self) -> Value:
        value = self._values.get(self.token)
        if value is None or value.type is _UNKNOWN:
            if self.token[:1] != "%" or self.token == "%":
                self.fail(f"expected a value such as %x, found '{self.token}'")
            known = [name for name, value in self._values.items() if value.type is not _UNKNOWN]
            self.fail(f"{self.token} is used before it is defined", _suggest(self.token, known))
        self.next()
        return value

    def attributes(self, known: KnownAttributes, owner: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self.accept("{"):
            while not self.accept("}"):
                if values:
                    self.expect(",", "an attribute")
                self.attribute(known, owner, values)
        if not known.required <= values.keys():
            missing = ", ".join(sorted(known.required - values.keys()))
            self.fail(
                f"{owner} lacks {missing}",
                f"write {{{missing.split(',')[0]} = ...}} among its attributes",
                back=1,
            )
        return values

    def attribute(self, known: KnownAttributes, owner: str, values: dict[str, Any]) -> None:
        name = self.token
        reader = known.readers.get(name)
        if reader is None:
            message = (
                f"'{name}' is no attribute of {owner}" if name else "the attributes do not end"
            )
            self.fail(message, _suggest(name, known.readers))
        if name in values:
            self.fail(f"{name} is given twice")
        self.next()
        self.expect("=", name)
        values[name] = self.read(reader, name)

    def type(self) -> Type:
        token = self.token
        known = self._types.get(token)
        if known is not None:
            self.next()
            return known
        try:
            type_ = literals.parse_type(token, self._meshes)
        except ValueError as problem:
            self.fail(f"a type: {problem}" if token else "the text ends before a type")
        self.next()
        self._types[token] = type_
        return type_

    def location(self) -> Location | None:
        if not self.accept("loc"):
            return None
        self.expect("(", "loc")
        file = self.read(literals.parse_string, "the location's file")
        self.expect(":", "the location's file")
        line = self.read(literals.parse_int, "the location's line")
        function = self.read(literals.parse_string, "a function") if self.accept("in") else ""
        self.expect(")", "the location")
        return Location(file, line, function)


_UNKNOWN: Type = literals.parse_type("unit@{4294967295}")
"""The type of a value until its own is read; compared by identity, so no other type equals it."""


def _suggest(word: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    if near := difflib.get_close_matches(word, choices, n=1):
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(sorted(choices)[:20])}" if choices else ""
