"""Functions that passes may call and every backend provides.

A builtin is declared in a module like any other function, with kind BUILTIN and a name of the
form `builtin.add.f32.8x512`, or `8-dpx512` of a tensor that is laid out; the part after the first
dot is its meaning. `pack` and `unpack` put flat tensors together and take them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..attributes import ReduceOp
from ..types import TensorType
from .module import Function, FunctionKind, Module

ADD = "add"
MULTIPLY = "multiply"
MINIMUM = "minimum"
MAXIMUM = "maximum"
PACK = "pack"
UNPACK = "unpack"

_REDUCTIONS = {
    ADD: ReduceOp.SUM,
    MULTIPLY: ReduceOp.PROD,
    MINIMUM: ReduceOp.MIN,
    MAXIMUM: ReduceOp.MAX,
}
_WORDS = {op: word for word, op in _REDUCTIONS.items()}

_IN_NAMES = str.maketrans({",": "x", "/": "-", "*": "$", "|": "-", "+": "-"})
"""The letters that stand in names for the signs of a type's text."""

NAMES = frozenset({*_REDUCTIONS, PACK, UNPACK})


def add(module: Module, type_: TensorType) -> Function:
    """Declare (once) and return the sum of two tensors of `type_`, for adding cotangents."""
    return combine(module, type_, ReduceOp.SUM)


def combine(module: Module, type_: TensorType, op: ReduceOp) -> Function:
    """Declare (once) and return what combines two tensors of `type_` as a reduction does.

    Raises:
        KeyError: `op` is the average, which is none of two at a time.
    """
    local = TensorType(type_.dtype, type_.shape, None, type_.layout)
    _, _, shape = str(local).rstrip("]").partition("[")
    name = f"builtin.{_WORDS[op]}.{type_.dtype}.{shape.translate(_IN_NAMES) or 'scalar'}"
    if name not in module.functions:
        module.functions[name] = Function(name, (local, local), (local,), kind=FunctionKind.BUILTIN)
    return module.functions[name]


def pack(
    module: Module, parts: Sequence[TensorType], whole: TensorType, count: int = 1
) -> Function:
    """Declare (once) and return what packs flat tensors, which are so many equal pieces each.

    What each rank has of `whole` are as many pieces, each with a piece of each part.
    """
    return _declared(module, f"{PACK}.{count}", tuple(map(_bare, parts)), (_bare(whole),))


def unpack(
    module: Module, whole: TensorType, parts: Sequence[TensorType], count: int = 1
) -> Function:
    """Declare (once) and return what takes apart what has been packed."""
    return _declared(module, f"{UNPACK}.{count}", (_bare(whole),), tuple(map(_bare, parts)))


def _declared(
    module: Module, base: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]
) -> Function:
    """The builtin of a signature; several with one base are numbered."""
    number = 0
    while (known := module.functions.get(f"builtin.{base}.{number}")) is not None:
        if (known.inputs, known.outputs) == (inputs, outputs):
            return known
        number += 1
    function = Function(f"builtin.{base}.{number}", inputs, outputs, kind=FunctionKind.BUILTIN)
    module.functions[function.name] = function
    return function


def _bare(type_: TensorType) -> TensorType:
    return TensorType(type_.dtype, type_.shape, None, type_.layout)


def pieces_of(function: Function) -> int:
    """The number of pieces that each tensor has of a function that packs or unpacks."""
    return int(function.body_name.split(".")[2])


def reduction(function: Function) -> ReduceOp | None:
    """The way in which a function combines two tensors elementwise, if it is such a builtin."""
    return _REDUCTIONS.get(meaning(function)) if function.kind is FunctionKind.BUILTIN else None


def meaning(function: Function) -> str:
    """The builtin that a function of kind BUILTIN is: one of `NAMES`.

    Raises:
        ValueError: the name is not of a known builtin.
    """
    parts = function.name.split(".")
    if len(parts) < 2 or parts[0] != "builtin" or parts[1] not in NAMES:
        raise ValueError(f"@{function.name} is no builtin; known are {', '.join(sorted(NAMES))}")
    return parts[1]
