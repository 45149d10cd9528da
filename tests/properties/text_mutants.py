"""Every small change of a dump: of one attribute, operand or type, or of one line's place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cg.ir.attributes import Stream

MEANING = frozenset(
    {
        *("fn", "key", "vjp"),
        *("fill", "ref", "dim", "start", "length", "region", "regions"),
        *("chan", "seq", "peer", "group", "op", "root"),
    }
)
"""The attributes of ops that say what a program computes: the function that is called, which part
of a tensor is meant, and which message of whom. All others say where and when it is done: the
stream, the slot, the batch and the graph, the microbatch and the task that it is for, the place in
the arena, and whether an operand is donated."""

LABELS = frozenset({"mb", "task", "why"})
"""Attributes of which one other value is enough: programs run the same with any."""

DISTANCES = (1, 2, 3, 5, 8, 13)
"""By how many lines an op is moved, up and down."""


@dataclass(frozen=True)
class Mutant:
    """A changed dump.

    Attributes:
        text: the whole of it.
        change: what was done, in words.
        keeps: whether it is to compute what the original does: only where and when has changed.
    """

    text: str
    change: str
    keeps: bool


@dataclass(frozen=True)
class _Line:
    """A line of a dump that holds an op, in its parts."""

    number: int
    program: int
    results: tuple[str, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]
    types: tuple[str, ...]

    def text(self) -> str:
        left = f"{', '.join(self.results)} = " if self.results else ""
        inner = ", ".join(f"{name} = {value}" for name, value in self.attributes)
        attributes = f" {{{inner}}}" if inner else ""
        types = f" : {', '.join(self.types)}" if self.types else ""
        return f"    {left}{self.opcode}({', '.join(self.operands)}){attributes}{types}"


_OP = re.compile(
    r"    (?:(?P<results>%[^=]+) = )?(?P<opcode>\w+)\((?P<operands>[^)]*)\)"
    r"(?: \{(?P<attributes>.*)\})?(?: : (?P<types>.*))?"
)
_PROGRAM = re.compile(r"  program @\d+\((.*)\) \{")
_ATTRIBUTE = re.compile(r"(\w+) = (\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|[^,]+)")
_TYPE = re.compile(r"[^,\[]+(?:\[[^\]]*\](?::\w+)?>?)?")


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a dump, each once."""
    seen = {text}
    for mutant in _Mutator(text).all():
        if mutant.text not in seen:
            seen.add(mutant.text)
            yield mutant


class _Mutator:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.ops: list[_Line] = []
        self.values: list[dict[str, str]] = []
        self._read()
        self.choices: dict[str, dict[str, None]] = defaultdict(dict)
        for op in self.ops:
            for name, value in op.attributes:
                self.choices[name][value] = None
        self.choices["stream"] = dict.fromkeys(stream.value for stream in Stream)
        self.types = dict.fromkeys(type_ for op in self.ops for type_ in op.types)

    def _read(self) -> None:
        for number, line in enumerate(self.lines):
            if begin := _PROGRAM.fullmatch(line):
                params = re.findall(r"(%[\w.$-]+): ([^%]+?)(?:, (?=%)|$)", begin[1])
                self.values.append(dict(params))
            elif (found := _OP.fullmatch(line)) and self.values:
                op = self._parse(number, found)
                assert op.text() == line, f"{op.text()}\n{line}"
                self.ops.append(op)
                self.values[-1].update(zip(op.results, op.types, strict=False))

    def _parse(self, number: int, found: re.Match[str]) -> _Line:
        def listed(name: str) -> tuple[str, ...]:
            return tuple((found[name] or "").split(", ")) if found[name] else ()

        return _Line(
            number,
            len(self.values) - 1,
            listed("results"),
            found["opcode"],
            listed("operands"),
            tuple(_ATTRIBUTE.findall(found["attributes"] or "")),
            tuple(t.strip() for t in _TYPE.findall(found["types"] or "")),
        )

    def all(self) -> Iterator[Mutant]:
        for op in self.ops:
            yield from self._attributes(op)
            yield from self._operands(op)
            yield from self._types(op)
            yield from self._presence(op)
            yield from self._places(op)
        yield from self._channels()

    def _attributes(self, op: _Line) -> Iterator[Mutant]:
        """Each attribute with each other value that it has somewhere, and without."""
        for at, (name, value) in enumerate(op.attributes):
            others: list[str | None] = [v for v in self.choices[name] if v != value]
            if value.isdigit():
                others += [str(int(value) + 1), str(int(value) - 1)]
            others = list(dict.fromkeys(others))[: 1 if name in LABELS else None]
            for other in (*others, None):
                new = [] if other is None else [(name, other)]
                attributes = (*op.attributes[:at], *new, *op.attributes[at + 1 :])
                line = replace(op, attributes=attributes)
                yield self._changed(line, f"{name} = {other}", name not in MEANING)
        missing = {"batch", "graph", "donated", "slot"} & self.choices.keys()
        for name in sorted(missing - {name for name, _ in op.attributes}):
            for value in self.choices[name]:
                line = replace(op, attributes=(*op.attributes, (name, value)))
                yield self._changed(line, f"{name} = {value}", True)

    def _operands(self, op: _Line) -> Iterator[Mutant]:
        """Each operand replaced by each other value of its type, or left out."""
        known = self.values[op.program]
        for at, value in enumerate(op.operands):
            others = [v for v, type_ in known.items() if type_ == known.get(value) and v != value]
            keeps = op.opcode == "free" or (op.opcode == "wait" and not self._gives_value(op))
            for other in (*others, None):
                new = () if other is None else (other,)
                line = replace(op, operands=(*op.operands[:at], *new, *op.operands[at + 1 :]))
                yield self._changed(line, f"{other} in place of {value}", keeps)

    def _gives_value(self, op: _Line) -> bool:
        return any(type_ != "unit" for type_ in op.types)

    def _types(self, op: _Line) -> Iterator[Mutant]:
        """Each type replaced by others that there are."""
        for at, type_ in enumerate(op.types):
            for other in [t for t in self.types if t != type_][:3]:
                types = (*op.types[:at], other, *op.types[at + 1 :])
                yield self._changed(replace(op, types=types), f"{other}, not {type_}", False)

    def _presence(self, op: _Line) -> Iterator[Mutant]:
        """The line left out; or twice, the second time with results of other names."""
        keeps = op.opcode in ("wait", "free", "view", "alloc", "copy", "slice")
        yield self._with({op.number: []}, op.number, "left out", keeps)
        again = replace(op, results=tuple(f"{value}.again" for value in op.results))
        lines = [op.text(), again.text()]
        yield self._with({op.number: lines}, op.number, "twice", keeps)
        for result in op.results:  # all that stands behind takes what the second one makes
            pattern = re.compile(re.escape(result) + r"(?![\w.$-])")
            new: dict[int, Sequence[str]] = {op.number: lines}
            for other in self.ops:
                if other.program == op.program and other.number > op.number:
                    text = pattern.sub(f"{result}.again", other.text())
                    new[other.number] = [text]
            yield self._with(new, op.number, f"twice, and {result} is that of the second", keeps)

    def _places(self, op: _Line) -> Iterator[Mutant]:
        """The line further down, or further up."""
        mine = [other.number for other in self.ops if other.program == op.program]
        at = mine.index(op.number)
        for distance in DISTANCES:
            for target in (at + distance, at - distance):
                if not 0 <= target < len(mine):
                    continue
                lines = [self.lines[number] for number in mine]
                lines.insert(target, lines.pop(at))
                new = {number: [line] for number, line in zip(mine, lines, strict=True)}
                yield self._with(new, op.number, f"moved by {target - at}", True)

    def _channels(self) -> Iterator[Mutant]:
        """Each attribute of a channel with other values, or without; and the channel left out."""
        channels = [(n, line) for n, line in enumerate(self.lines) if line.startswith("  channel ")]
        values: dict[str, dict[str, None]] = defaultdict(dict)
        for _, line in channels:
            for name, value in _ATTRIBUTE.findall(line[line.index("{") + 1 : -1]):
                values[name][value] = None
        values["via"] |= {"cpu": None, "nccl": None}
        for number, line in channels:
            yield self._with({number: []}, number, "left out", True)
            start = line.index("{") + 1
            attributes = _ATTRIBUTE.findall(line[start:-1])
            for at, (name, value) in enumerate(attributes):
                others: list[str | None] = [v for v in values[name] if v != value]
                if value.isdigit():
                    others += [str(int(value) + 1), str(int(value) - 1)]
                for other in (*(others[:1] if name in LABELS else others), None):
                    new = [] if other is None else [(name, other)]
                    found = (*attributes[:at], *new, *attributes[at + 1 :])
                    inner = ", ".join(f"{name} = {value}" for name, value in found)
                    text = f"{line[:start]}{inner}}}"
                    yield self._with({number: [text]}, number, f"{name} = {other}", True)

    def _changed(self, op: _Line, change: str, keeps: bool) -> Mutant:
        return self._with({op.number: [op.text()]}, op.number, change, keeps)

    def _with(
        self, new: Mapping[int, Sequence[str]], number: int, change: str, keeps: bool
    ) -> Mutant:
        lines: list[str] = []
        for index, line in enumerate(self.lines):
            lines += new.get(index, [line])
        where = self.lines[number].strip()
        return Mutant("\n".join(lines) + "\n", f"{change}: {where}", keeps)
