"""A function of one graph that takes weights in float8: a program that casts them, and calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.attributes import Symbol
from ...ir.ops import Call, Return, Value
from ...ir.ops.module import FunctionKind, Program
from ...ir.ops.names import Names
from ...ir.types import TensorType, UnitType
from ..graph.autodiff.subgraphs import Subgraph
from ..values.actor_state import StateTensor
from ..values.interface import TracedPart
from .float8_weights import Float8Weights


def taking(section: Subgraph, weights: Float8Weights) -> tuple[Subgraph, tuple[StateTensor, ...]]:
    """A section whose prepared weights are inputs, and these.

    Among the state that it reads, they stand behind all else.

    Args:
        section: the section.
        weights: the weights of its actor.
    """
    prepared = tuple(tensor for tensor in section.reads if tensor.sources)
    count = len(prepared)
    own = section.reads[: len(section.reads) - count]
    assert not any(tensor.sources for tensor in own), "state comes first"
    types = tuple(_type(tensor, weights) for tensor in prepared)
    return (
        replace(
            section,
            reads=own,
            takes=(*types, *section.takes),
            dense=(*(True for _ in prepared), *section.dense),
            aliases=tuple((result, operand + count) for result, operand in section.aliases),
        ),
        prepared,
    )


def _type(tensor: StateTensor, weights: Float8Weights) -> TensorType:
    if len(tensor.sources) > 1:
        return weights.reduced
    (type_,) = weights.casts(tensor.sources[0].path).declaration.outputs
    assert isinstance(type_, TensorType), "a cast is a tensor"
    return type_


def preparing(
    part: TracedPart, prepared: Sequence[StateTensor], weights: Float8Weights, name: str
) -> TracedPart:
    """The function `name`, which prepares weights and calls a function that takes them first.

    Args:
        part: the function that is called.
        prepared: what it takes first, as `taking` gives it.
        weights: the weights of its actor.
        name: the name of the new function.
    """
    outputs = part.declaration.outputs or (UnitType(),)
    function, names = replace(part.declaration, outputs=outputs), Names()
    loc = function.loc
    called = [replace(part, declaration=function)]
    ops: list[Call | Return] = []

    def call(prepares: TracedPart, operands: tuple[Value, ...], base: str) -> Value:
        called.append(prepares)
        (type_,) = prepares.declaration.outputs
        result = Value(names.fresh(base), type_)
        ops.append(Call(operands, (result,), fn=Symbol(prepares.declaration.name), loc=loc))
        return result

    params = [Value(names.fresh("x"), t) for t in function.inputs[len(prepared) :]]
    scales = call(weights.scales(), (call(weights.maxima(), (), "maxima"),), "scales")
    values = [
        scales
        if len(tensor.sources) > 1
        else call(weights.casts(tensor.sources[0].path), (scales,), "weight")
        for tensor in prepared
    ]
    results = tuple(Value(names.fresh("y"), type_) for type_ in function.outputs)
    key = 0 if function.random else None
    fn = Symbol(function.name)
    ops += [Call((*values, *params), results, fn=fn, key=key, loc=loc), Return(results, ())]
    count = len(prepared)
    declaration = replace(
        function,
        name=name,
        inputs=function.inputs[count:],
        kind=FunctionKind.PROGRAM,
        aliases=tuple((y, x - count) for y, x in function.aliases),
    )
    return TracedPart(declaration, None, Program(name, params, [*ops]), tuple(called))
