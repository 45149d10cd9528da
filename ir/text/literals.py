"""Read single tokens of the text form: types, places and the values of attributes."""

from __future__ import annotations

import enum
import itertools
import json
import re
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..attributes import Effect, ReduceOp, Shares, Symbol, Task
from ..flops import Flops
from ..layout import WHOLE, Cut, Intervals, Layout, Region, is_region, merge
from ..location import Location
from ..types import (
    MOST_RANKS,
    DType,
    FutureType,
    MemorySpace,
    Mesh,
    ObjectType,
    Place,
    TensorType,
    Type,
    UnitType,
)

_TYPE = re.compile(
    r"(?:(?P<kind>object|unit)|(?P<dtype>\w+)\[(?P<dims>[^|]*?)(?:\|(?P<summands>.*))?\])"
    r"(?:@(?P<place>(?P<rank>\d+)|\{.*\}|(?P<mesh>[A-Za-z_]\w*)))?(?P<host>:host)?",
    re.DOTALL,
)
_DIM = re.compile(
    r"(?:(?P<blocks>\d+)\s*\*\s*)?(?P<size>\d+)(?:\s*x\s*(?P<unit>\d+))?"
    r"(?:\s*/\s*(?P<axes>[\w.*\s]+)(?P<zigzag>~\s*)?(?:\+\s*(?P<shift>\d+)\s*)?)?"
)
_SUMMANDS = re.compile(r"\s*(?:\+|(?P<reduce>\w+)\s*:)(?P<axes>[\w.*\s]+)")
_FUTURE = re.compile(r"future<(.*)>", re.DOTALL)
_PAIR = re.compile(r"(\d+)\s*->\s*(\d+)")
_RUN = re.compile(r"(\d+)\s*(?:\.\.\s*(\d+))?")
_COUNT = re.compile(rf"({'|'.join(dtype.value for dtype in DType)})\s*:\s*([0-9]{{1,30}})")
_SHARE = re.compile(rf"([A-Za-z_][\w.-]*)\s*:\s*({'|'.join(effect.value for effect in Effect)})")
_REGION = re.compile(r"\[([^\[\]]*)\]")
_REGIONS = re.compile(rf"{_REGION.pattern}(?:\s*,\s*{_REGION.pattern})*+")
_INTERVAL = re.compile(r"(\d+)\s*:\s*(\d+)")
_LOCATION = re.compile(r'loc\("([^"\\\n]*)":(\d+)(?: in ([A-Za-z_][\w.-]*|"[^"\\\n]*"))?\)')
_PLAIN = re.compile(r"[\w.$-]+")

_MOST_BLOCKS = 1 << 16
_LARGEST = (1 << 63) - 1

Reader = Callable[[str], Any]
"""Turns a token into a value, or raises a ValueError that says what to write instead."""

NO_MESHES: Mapping[str, Mesh] = types.MappingProxyType({})


def parse_type(text: str, meshes: Mapping[str, Mesh] = NO_MESHES) -> Type:
    """Read a type in the form that its `str()` writes.

    Args:
        text: the type.
        meshes: the meshes that it may refer to, by name.

    Raises:
        ValueError: `text` is not a type.
    """
    if future := _FUTURE.fullmatch(text):
        if _FUTURE.fullmatch(future[1]):
            raise ValueError(f"'{text}' is a future of a future")
        inner = parse_type(future[1], meshes)
        assert not isinstance(inner, FutureType), "it would be one of a future"
        return FutureType(inner)
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"'{text}' is not a type; write f32[8,512], object, unit or future<T>, "
            "with a place such as @0, @{0..3} or the name of a mesh behind it"
        )
    place = _place_of(match, meshes)
    if match["kind"] is not None and match["host"] is None:
        return ObjectType(place) if match["kind"] == "object" else UnitType(place)
    if match["kind"] is not None:
        raise ValueError(f"'{text}' is no tensor; only tensors are in a host's memory")
    dtype = parse_enum(DType, match["dtype"])
    shape, cuts = _dims(text, match["dims"])
    summands, reduce = _summands(text, match["summands"])
    space = MemorySpace.DEVICE if match["host"] is None else MemorySpace.HOST
    return TensorType(dtype, shape, place, Layout.of(cuts, summands, reduce), space)


def _place_of(match: re.Match[str], meshes: Mapping[str, Mesh]) -> Place | None:
    if match["place"] is None:
        return None
    if match["mesh"] is not None:
        name = match["mesh"]
        if name not in meshes:
            known = ", ".join(f"@{mesh}" for mesh in meshes) or "none"
            raise ValueError(f"the module declares no mesh @{name}; it has {known}")
        return meshes[name]
    return Place((int(match["rank"]),)) if match["rank"] else _place(match["place"])


def _dims(text: str, dims: str) -> tuple[tuple[int, ...], tuple[Cut, ...]]:
    """The shape, and the cut of each dimension."""
    shape, cuts = [], []
    for dim in dims.split(",") if dims.strip() else []:
        match = _DIM.fullmatch(dim.strip())
        if match is None or ((match["blocks"] or match["unit"]) and not match["axes"]):
            raise ValueError(
                f"'{text}' is not a type: its shape is not numbers between commas, each with the "
                "axes that cut it behind a slash, if any: 8, 8/dp, 64/tp.dp, 3*64/tp, 8x7/dp, "
                "16/cp~, 16/cp+1"
            )
        blocks, unit = int(match["blocks"] or 1), int(match["unit"] or 1)
        if not blocks or not unit:
            raise ValueError(f"'{text}' has a dimension of 0 blocks, or of units of 0")
        if blocks > _MOST_BLOCKS:
            raise ValueError(f"'{text}' has more than {_MOST_BLOCKS:,} blocks, the most of a type")
        size = blocks * int(match["size"]) * unit
        if size > _LARGEST:
            raise ValueError(f"'{text}' has a dimension of more than 2**63 - 1, the most of a type")
        shape.append(size)
        cuts.append(_cut(match, blocks, unit) if match["axes"] else WHOLE)
    return tuple(shape), tuple(cuts)


def _cut(match: re.Match[str], blocks: int, unit: int) -> Cut:
    shift = int(match["shift"] or 0)
    return Cut(_axes(match["axes"]), blocks, unit, match["zigzag"] is not None, shift)


def _summands(text: str, summands: str | None) -> tuple[tuple[str, ...], ReduceOp]:
    """The axes of summands, and the operation that combines the summands."""
    if summands is None:
        return (), ReduceOp.SUM
    match = _SUMMANDS.fullmatch(summands)
    if match is None:
        raise ValueError(f"'{text}' has summands that are not of the form |+tp or |max:tp")
    reduce = ReduceOp.SUM if match["reduce"] is None else parse_enum(ReduceOp, match["reduce"])
    return _axes(match["axes"]), reduce


def _axes(text: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in text.split("."))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read ranks, or any indices, in the form `{0..3,7}`.

    Raises:
        ValueError: `text` has another form, or more than `MOST_RANKS` ranks.
    """
    runs = [
        range(int(first), int(last or first) + 1)
        for first, last in _items(text, _RUN, "not a set of ranks; write {0..3,7}")
    ]
    if sum(max(run.stop - run.start, 0) for run in runs) > MOST_RANKS:
        raise ValueError(f"'{text}' has more than {MOST_RANKS:,} ranks, the most that cg takes")
    return tuple(itertools.chain.from_iterable(runs))


def parse_world(text: str) -> int:
    """The number of ranks of a module.

    Raises:
        ValueError: `text` is not a whole number from 1 to `MOST_RANKS`.
    """
    count = parse_int(text)
    if not 1 <= count <= MOST_RANKS:
        raise ValueError(f"a world has 1 to {MOST_RANKS:,} ranks, not {text}")
    return count


def _items(text: str, form: re.Pattern[str], problem: str) -> list[tuple[str, str]]:
    """The two parts of each item between braces; there may be no items.

    Raises:
        ValueError: an item does not match `form`; the message ends in `problem`.
    """
    inner = text[1:-1].strip()
    items = [form.fullmatch(part.strip()) for part in inner.split(",")] if inner else []
    pairs = [(item[1], item[2]) for item in items if item is not None]
    if (text[:1], text[-1:]) != ("{", "}") or len(pairs) < len(items):
        raise ValueError(f"'{text}' is {problem}")
    return pairs


def _table(text: str, form: re.Pattern[str], problem: str) -> dict[str, str]:
    """The second parts of the items between braces, by the first parts, which must differ."""
    items = _items(text, form, problem)
    if len(dict(items)) < len(items):
        raise ValueError(f"'{text}' is {problem}")
    return dict(items)


def parse_enum(cls: type[enum.Enum], text: str) -> Any:
    """The member of `cls` with this value.

    Raises:
        ValueError: no member has this value.
    """
    for member in cls:
        if member.value == text:
            return member
    choices = ", ".join(str(member.value) for member in cls)
    raise ValueError(f"'{text}' is not one of {choices}")


def parse_string(text: str) -> str:
    """Read a bare word, or a string in double quotes."""
    if text.startswith('"'):
        return unquote(text)
    if not (text[:1].isalpha() or text[:1] == "_"):
        raise ValueError(f"'{text}' is not a word; put it in double quotes")
    return text


def parse_location(text: str) -> Location:
    """Read a location as it is printed, without escapes: `loc("train.py":12 in step)`."""
    parts = _LOCATION.fullmatch(text)
    if parts is None:
        raise ValueError(f"'{text}' is no location")
    file, line, function = parts.groups()
    return Location(file, int(line), parse_string(function) if function else "")


def parse_symbol(text: str) -> Symbol:
    """Read a symbol, `@name`."""
    if text[:1] != "@":
        raise ValueError(f"'{text}' is not a symbol; write @name")
    return Symbol(parse_name(text))


def parse_name(text: str) -> str:
    """The name in the text of a value or a symbol, without its first character."""
    name = text[1:]
    if name.startswith('"'):
        return unquote(name)
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"'{text}' lacks a name")
    return name


def unquote(text: str) -> str:
    """Read a string in double quotes, with JSON's escapes."""
    try:
        return str(json.loads(text))
    except ValueError:
        raise ValueError(f"{text} is not a string with JSON's escapes") from None


def parse_int(text: str) -> int:
    """Read a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a whole number") from None


def reader_for(annotation: Any) -> Reader:
    """The reader for a dataclass field with this annotation, `T` or `T | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [arg for arg in get_args(annotation) if arg is not type(None)]
        return reader_for(inner[0]) if len(inner) == 1 else _number
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return partial(parse_enum, annotation)
    return _READERS[annotation]


def readers_of(cls: type) -> dict[str, Reader]:
    """The readers for a dataclass's fields, by field name; fields without a reader are left out."""
    readers: dict[str, Reader] = {}
    for name, annotation in get_type_hints(cls).items():
        try:
            readers[name] = reader_for(annotation)
        except (KeyError, TypeError):
            continue  # structure, such as operands or types, which has its own syntax
    return readers


def _place(text: str) -> Place:
    return Place(parse_ranks(text))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    pairs = _items(text, _PAIR, "not a set of pairs; write {0 -> 1, 1 -> 0}")
    return tuple((int(first), int(second)) for first, second in pairs)


def _region(text: str) -> Region:
    match = _REGION.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no region; {_REGION_HELP}")
    return tuple(map(_intervals, match[1].split(","))) if match[1].strip() else ()


def _intervals(text: str) -> Intervals:
    matches = [_INTERVAL.fullmatch(part.strip()) for part in text.split("+")]
    pairs = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    intervals = merge(pairs)
    if len(pairs) < len(matches) or not is_region((intervals,)):
        raise ValueError(f"'{text.strip()}' is not the indices of a dimension; {_REGION_HELP}")
    return intervals


_REGION_HELP = "write [0:4,0:64], or [0:4+8:12] for several intervals, which ascend"


def _regions(text: str) -> tuple[Region, ...]:
    inner = text[1:-1].strip()
    if (text[:1], text[-1:]) != ("{", "}") or (inner and not _REGIONS.fullmatch(inner)):
        raise ValueError(f"'{text}' is not a set of regions; write {{[0:4,0:64], [4:8,0:64]}}")
    return tuple(_region(match[0]) for match in _REGION.finditer(inner))


def _flops(text: str) -> Flops:
    problem = "no count of operations by element type; write {bf16: 1024, f32: 8}"
    counts = _table(text, _COUNT, problem)
    return Flops.of({DType[name.upper()]: int(count) for name, count in counts.items()})


def _shares(text: str) -> Shares:
    problem = "no set of effects by actor; write {stage0: write, stage1: read}"
    effects = _table(text, _SHARE, problem)
    return Shares.of({actor: Effect(word) for actor, word in effects.items()})


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"'{text}' is neither true nor false")
    return text == "true"


def _number(text: str) -> float | int | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number, true or false") from None


_READERS: dict[Any, Reader] = {
    bool: _bool,
    int: parse_int,
    str: parse_string,
    Symbol: parse_symbol,
    Place: _place,
    Task: Task.parse,
    Flops: _flops,
    Shares: _shares,
    tuple[int, ...]: parse_ranks,
    tuple[tuple[int, int], ...]: _pairs,
    Region: _region,
    tuple[Region, ...]: _regions,
}
