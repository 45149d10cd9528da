"""Functions that passes may call and every backend provides.

A builtin is declared in a module like any other function, with kind BUILTIN and a name such as
`builtin.add.f32.8x512`. The shape of a tensor that is laid out reads `8-dpx512`. The word after the
first dot says which builtin it is. `pack` and `unpack` put flat tensors together and take them
apart.
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
"""The characters that replace the signs of a type's text in names."""

NAMES = frozenset({*_REDUCTIONS, PACK, UNPACK})


def add(module: Module, type_: TensorType) -> Function:
    """Declare, once, the function that adds two tensors of `type_`, and return it."""
    return combine(module, type_, ReduceOp.SUM)


def is_addition(name: str) -> bool:
    """Whether a function of this name is one that `add` declares."""
    return name.startswith(f"builtin.{ADD}.")


def combine(module: Module, type_: TensorType, op: ReduceOp) -> Function:
    """Declare, once, the function that combines two tensors of `type_` by `op`, and return it.

    Raises:
        KeyError: `op` is the average, which cannot be taken two tensors at a time.
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
    """Declare, once, the function that packs flat tensors into one, and return it.

    Args:
        module: the module that gets the declaration.
        parts: the types of the flat tensors, shape (n,) each.
        whole: the type of the packed tensor, shape (the sum of all n,).
        count: the number of equal pieces that each tensor has at a rank. Piece i of the packed
            tensor consists of the pieces i of all parts.
    """
    return _declared(module, f"{PACK}.{count}", tuple(map(_bare, parts)), (_bare(whole),))


def unpack(
    module: Module, whole: TensorType, parts: Sequence[TensorType], count: int = 1
) -> Function:
    """Declare, once, the function that undoes `pack`, and return it."""
    return _declared(module, f"{UNPACK}.{count}", (_bare(whole),), tuple(map(_bare, parts)))


def _declared(
    module: Module, base: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]
) -> Function:
    """The builtin with this signature; builtins with one base name are numbered."""
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
    """The number of pieces of each tensor at a rank, for a function that packs or unpacks."""
    return int(function.body_name.split(".")[2])


def reduction(function: Function) -> ReduceOp | None:
    """The operation by which a builtin combines two tensors; None of all other functions."""
    return _REDUCTIONS.get(meaning(function)) if function.kind is FunctionKind.BUILTIN else None


def meaning(function: Function) -> str:
    """Which builtin a function of kind BUILTIN is: one of `NAMES`.

    Raises:
        ValueError: the name is not of a known builtin.
    """
    parts = function.name.split(".")
    if len(parts) < 2 or parts[0] != "builtin" or parts[1] not in NAMES:
        raise ValueError(f"@{function.name} is no builtin; known are {', '.join(sorted(NAMES))}")
    return parts[1]
