"""Random modules: right in form, whatever they mean."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cg.ir.attributes import Action, Effect, ReduceOp, Shares, Stream, Symbol, Task, Traffic
from cg.ir.flops import Flops
from cg.ir.layout import Cut, Layout, merge
from cg.ir.location import Location
from cg.ir.ops import OP_CLASSES, Op, Value, attribute_names
from cg.ir.ops.module import Channel, Function, FunctionKind, Module, Program, Vjp
from cg.ir.phases import Phase
from cg.ir.types import (
    DType,
    FutureType,
    Mesh,
    ObjectType,
    Place,
    TensorType,
    Type,
    UnitType,
    promised,
    relocate,
)

small = st.integers(0, 9)
names = st.one_of(
    st.sampled_from(["x", "h.0", "stage0.forward", "a-b", "$1", "module", "0"]), st.text()
)
words = st.one_of(st.sampled_from(["nccl", "mpi", "inf", "nan", "true", "unit", "f32"]), st.text())
places = st.lists(small, min_size=1, max_size=4, unique=True).map(tuple).map(Place)
axes = st.lists(st.sampled_from(["*", "dp", "tp", "kv"]), max_size=2).map(tuple)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of a few names, with one to three axes."""
    words = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,3}", fullmatch=True)
    words = words.filter(lambda word: word != "ranks")
    names = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    sizes = [draw(st.integers(1, 3)) for _ in names]
    first = draw(small)
    ranks = draw(st.permutations(range(first, first + math.prod(sizes))))
    name = draw(st.sampled_from(["m", "grid", "a_1"]))
    return Mesh(tuple(ranks), name, tuple(zip(names, sizes, strict=True)))


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    """Tensors with and without layouts, which need not fit their places."""
    shape, cuts = [], []
    for _ in range(draw(st.integers(0, 3))):
        cut_axes = draw(axes)
        blocks = draw(st.integers(1, 3)) if cut_axes else 1
        shape.append(blocks * draw(small))
        zigzag = bool(cut_axes) and draw(st.booleans())
        shift = draw(st.integers(0, 2)) if cut_axes else 0
        cuts.append(Cut(cut_axes, blocks, 1, zigzag, shift))
    summands = draw(axes)
    reduce = draw(st.sampled_from(ReduceOp)) if summands else ReduceOp.SUM
    layout = Layout.of(cuts, summands, reduce)
    place = draw(st.none() | places | meshes())
    return TensorType(draw(st.sampled_from(DType)), tuple(shape), place, layout)


intervals = st.lists(st.integers(0, 99), max_size=6, unique=True).map(
    lambda ends: merge(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)
regions = st.lists(intervals, max_size=3).map(tuple)
value_types = st.one_of(
    tensor_types(),
    st.builds(ObjectType, st.none() | places),
    st.builds(UnitType, st.none() | places),
)
types = value_types | st.builds(FutureType, value_types)
locations = st.builds(Location, st.text(), small, st.text())
indices = st.lists(small, max_size=3).map(tuple)
symbols = st.builds(Symbol, names)

ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "mb": st.none() | small,
    "task": st.none() | st.builds(Task, small, st.sampled_from(Action), small),
    "stream": st.none() | st.sampled_from(Stream),
    "fill": st.none() | st.floats() | st.integers() | st.booleans(),
    "ref": st.none() | symbols,
    "vjp": st.none() | symbols,
    "fn": symbols,
    "key": st.none() | small,
    "traffic": st.none() | st.sampled_from(Traffic),
    "donated": st.none() | st.booleans(),
    "via": st.none() | words,
    "why": st.none() | words,
    "slot": st.none() | small,
    "chan": small,
    "seq": small,
    "group": places,
    "at": st.none() | places,
    "op": st.sampled_from(ReduceOp),
    "region": regions,
    "regions": st.lists(regions, max_size=3).map(tuple),
    "experts": st.lists(regions, max_size=3).map(tuple),
    "dispatch": st.none() | words,
    "form": st.none() | words,
}

flops = st.dictionaries(st.sampled_from(DType), st.integers(0, 10**15), max_size=3).map(Flops.of)
functions = st.builds(
    Function,
    names,
    st.lists(value_types, max_size=3).map(tuple),
    st.lists(value_types, max_size=3).map(tuple),
    st.sampled_from(FunctionKind),
    st.sampled_from(Effect),
    st.none() | words,
    st.booleans(),
    st.lists(st.tuples(small, small), max_size=2).map(tuple),
    st.none() | locations,
    st.none() | words,
    st.booleans(),
    flops,
    small,
    st.dictionaries(
        st.from_regex(r"[a-z_][\w.-]*", fullmatch=True), st.sampled_from(Effect), max_size=3
    ).map(Shares.of),
    indices,
    st.none() | words,
    st.none() | words,
    indices,
)
maybe = st.none() | names
vjps = st.builds(Vjp, names, names, names, indices, indices, maybe, maybe, indices)
channels = st.builds(
    Channel,
    small,
    indices,
    st.booleans(),
    st.none() | words,
    st.none() | small,
    st.none() | small,
    st.none() | words,
    st.none() | st.sampled_from(Traffic),
)


@st.composite
def ops(draw: st.DrawFn, phase: Phase, defined: list[Value], fresh: list[str]) -> Op:
    cls = draw(st.sampled_from([cls for cls in OP_CLASSES.values() if phase in cls.phases]))
    operands = draw(st.lists(st.sampled_from(defined), max_size=3)) if defined else []
    results = [Value(fresh.pop(), draw(types)) for _ in range(draw(st.integers(0, 2))) if fresh]
    attributes = {name: draw(ATTRIBUTES.get(name, small)) for name in attribute_names(cls)}
    defined += results
    return cls(tuple(operands), tuple(results), loc=draw(st.none() | locations), **attributes)


@st.composite
def programs(draw: st.DrawFn, phase: Phase, name: str, rank: int | None) -> Program:
    fresh = draw(st.lists(names, max_size=8, unique=True))
    program = Program(name, rank=rank)
    program.params = [Value(fresh.pop(), draw(types)) for _ in range(min(2, len(fresh)))]
    defined = list(program.params)
    program.ops = [draw(ops(phase, defined, fresh)) for _ in range(draw(st.integers(0, 6)))]
    return program


@st.composite
def modules(draw: st.DrawFn, phase: Phase) -> Module:
    name = draw(names)
    module = Module(name, phase, draw(st.integers(1, 3)))
    module.functions = {f.name: f for f in draw(st.lists(functions, max_size=3))}
    module.vjps = {vjp.name: vjp for vjp in draw(st.lists(vjps, max_size=2))}
    module.channels = {channel.id: channel for channel in draw(st.lists(channels, max_size=2))}
    if phase is Phase.SCHEDULED:
        module.programs = [draw(programs(phase, name, rank)) for rank in range(module.world)]
    else:
        module.programs = [draw(programs(phase, name, None))]
    _declare_meshes(module)
    return module


def _declare_meshes(module: Module) -> None:
    """Declare the meshes that types name; of several that share a name, types take the first."""

    def declared(type_: Type) -> Any:
        place = promised(type_).place
        if isinstance(place, Mesh):
            place = module.meshes.setdefault(place.name, place)
        return relocate(type_, place)

    for name, f in module.functions.items():
        inputs, outputs = (tuple(map(declared, types)) for types in (f.inputs, f.outputs))
        module.functions[name] = replace(f, inputs=inputs, outputs=outputs)
    for program in module.programs:
        for value in (*program.params, *(v for op in program.ops for v in op.results)):
            value.type = declared(value.type)
