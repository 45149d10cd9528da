"""Rules of ops that no family has: taken apart into others, or run on whole tensors.

An op on lists of tensors is that op on each of them. What torch knows to decompose into other ops
is decomposed where a tensor is cut. An op whose operands are all whole runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..cases import Answer, Case, Expansion, LayoutError, whole

_ATEN = torch.ops.aten
_LISTS = "aten::_foreach_"
_EACH = frozenset(
    {
        *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp"),
        *("lerp", "log", "mul", "neg", "norm", "pow", "reciprocal", "rsqrt", "sign", "sqrt"),
        *("sub", "zero"),
    }
)
"""Ops on lists of tensors, by the name of the op on each of them."""


def rule(case: Case) -> Answer | Expansion:
    """The rule of ops without one of their own.

    Raises:
        LayoutError: a tensor is cut, and torch has no decomposition.
    """
    if _is_of_lists(case.target):
        return Expansion(partial(_of_lists, case.target))
    if not any(cut for operand in case.operands for cut in operand.cuts):
        return _on_copies(case)
    decomposition = _decomposition(case.target)
    if decomposition is None:
        raise no_rule(case)
    return Expansion(partial(_decomposed, case, decomposition))


def _is_of_lists(target: torch._ops.OpOverload) -> bool:
    name = target._schema.name
    known = name.removeprefix(_LISTS).removesuffix("_") in _EACH
    return name.startswith(_LISTS) and known and target._overloadname != "ScalarAndTensor"


def no_rule(case: Case) -> LayoutError:
    """The error that nothing says what an op does with tensors that are cut."""
    return LayoutError(
        f"{case.name} has no rule that says what it does with tensors that are cut",
        loc=case.loc,
        remedy="call it where its operands are whole, as behind x = cg.layout(x, cg.whole); or say "
        "what it does by cg.layout_rule, if the operator is your own; or add a rule for it to a "
        "module of tracer/graph/layouts/rules (CONTRIBUTING.md, 'Add a layout rule')",
    )


def _on_copies(case: Case) -> Answer:
    """All ranks compute the same; what they draw at random is the same, too."""
    operand_layouts = tuple(whole(len(operand.shape)) for operand in case.operands)
    results = tuple(None if shape is None else whole(len(shape)) for shape in case.shapes)
    return Answer(operand_layouts, results)


def _decomposition(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Torch's own, of an op that neither draws random numbers nor writes to what it takes."""
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return None
    return torch._decomp.decomposition_table.get(target)


def _decomposed(case: Case, function: Callable[..., Any], **arguments: Any) -> Any:
    schema = case.target._schema.arguments
    positional = [arguments[argument.name] for argument in schema if not argument.kwarg_only]
    named = {argument.name: arguments[argument.name] for argument in schema if argument.kwarg_only}
    results = function(*positional, **named)
    if results is NotImplemented:
        raise no_rule(case)
    return tuple(results) if isinstance(results, tuple) else results  # some have named fields


def _of_lists(target: torch._ops.OpOverload, **values: Any) -> list[Any] | None:
    """The op on each tensor of the lists that it takes."""
    op = _of_tensor(target)
    arguments = [(argument, values[argument.name]) for argument in target._schema.arguments]
    results = [_of_one(op, arguments, index) for index in range(len(arguments[0][1]))]
    return None if target._schema.is_mutable else results


def _of_tensor(target: torch._ops.OpOverload) -> Any:
    name = target._schema.name.removeprefix(_LISTS)
    return _ATEN.linalg_vector_norm if name == "norm" else getattr(_ATEN, name)


def _of_one(op: Any, arguments: Sequence[tuple[Any, Any]], index: int) -> Any:
    """One call; factors of products that are added have a name in the op on a tensor."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument, value in arguments:
        own = value[index] if isinstance(value, (list, tuple)) else value
        if argument.kwarg_only or argument.name == "dtype":
            named[argument.name] = own
        elif argument.name in ("value", "scalars") and len(positional) == 3:
            named["value"] = own
        else:
            positional.append(own)
    return op(*positional, **named)
