"""Rules of ops that belong to no family: they are decomposed, or run on whole tensors.

An op on lists of tensors becomes one op for each tensor. An op whose operands are all whole runs
unchanged. If an operand is cut, torch's decomposition of the op replaces it.
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
"""Ops on lists of tensors, by the name of the op on one tensor."""


def rule(case: Case) -> Answer | Expansion:
    """The rule of ops that have no rule of their own.

    Raises:
        LayoutError: an operand is cut, and torch has no decomposition of the op.
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
    """The error that an op has no rule for tensors that are cut."""
    return LayoutError(
        f"{case.name} has no rule that says what it does with tensors that are cut",
        loc=case.loc,
        remedy="call it where its operands are whole, as behind x = cg.layout(x, cg.whole); or say "
        "what it does by cg.layout_rule, if the operator is your own; or add a rule for it to a "
        "module of tracer/graph/layouts/rules (CONTRIBUTING.md, 'Add a layout rule')",
    )


def _on_copies(case: Case) -> Answer:
    """All ranks compute the same. Random numbers are the same on all ranks, too."""
    operand_layouts = tuple(whole(len(operand.shape)) for operand in case.operands)
    results = tuple(None if shape is None else whole(len(shape)) for shape in case.shapes)
    return Answer(operand_layouts, results)


def _decomposition(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Torch's decomposition of an op.

    None if torch has none, or if the op draws random numbers or writes to its operands.
    """
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
    """Call the op of one tensor for each tensor of the lists."""
    op = _of_tensor(target)
    arguments = [(argument, values[argument.name]) for argument in target._schema.arguments]
    results = [_of_one(op, arguments, index) for index in range(len(arguments[0][1]))]
    return None if target._schema.is_mutable else results


def _of_tensor(target: torch._ops.OpOverload) -> Any:
    name = target._schema.name.removeprefix(_LISTS)
    return _ATEN.linalg_vector_norm if name == "norm" else getattr(_ATEN, name)


def _of_one(op: Any, arguments: Sequence[tuple[Any, Any]], index: int) -> Any:
    """Call the op for the tensors at one index of the lists.

    The factor of the product in `addcmul` and `addcdiv` is the argument `value` there.
    """
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
