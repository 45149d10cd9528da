"""A lowered transfer of summands from which a reduction is taken out is refused by the verifier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings

from cg.ir.attributes import ReduceOp
from cg.ir.ops import Call, Collective, Op, Value
from cg.ir.ops.builtins import reduction
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.types import tensor_bytes
from cg.ir.verify.verifier import verify
from cg.passes.placement.lower_transfers import LowerTransfers
from cg.passes.placement.split_transfers import SplitTransfers

from ..sampling import scaled
from .random_transfers import Types, as_module, is_valid, summands, transfers
from .random_transfers import reduction as how_combined

bounded = settings(max_examples=scaled(60))


def reductions(module: Module) -> Iterator[tuple[Value, Value]]:
    """The results of what combines summands, each with the operands."""
    for op in module.program.ops:
        adds = isinstance(op, Call) and reduction(module.functions[op.fn.name]) is not None
        if adds or (isinstance(op, Collective) and op.exchange.reduce is not None):
            yield from ((result, operand) for result in op.results for operand in op.operands)


def users(module: Module, value: Value) -> list[Op]:
    return [op for op in module.program.ops if value in op.operands]


def is_needed_everywhere(types: Types) -> bool:
    """If each result counts.

    Where the target holds summands of a minimum, and a copy of the source stands on each of their
    ranks, one complete minimum is enough: the others may be those of fewer values.
    """
    source, target = types
    return not (summands(target) and how_combined(source) in (ReduceOp.MIN, ReduceOp.MAX))


@given(transfers().filter(is_valid).filter(lambda types: summands(types[0])))
@bounded
def test_every_reduction_is_needed(types: Types) -> None:
    assume(is_needed_everywhere(types))
    module = as_module(types)
    LowerTransfers().run(module)
    verify(module)
    pairs = [(a, b) for a, b in reductions(module) if tensor_bytes(a.type) and users(module, a)]
    assume(pairs)
    for result, operand in pairs:
        changed = users(module, result)
        before = [op.operands for op in changed]
        for op in changed:
            op.operands = tuple(operand if value is result else value for value in op.operands)
        with pytest.raises(IRError):
            verify(module)
        for op, operands in zip(changed, before, strict=True):
            op.operands = operands
    verify(module)


@given(transfers().filter(is_valid).filter(lambda types: summands(types[0])))
@bounded
def test_messages_carry_their_summands(types: Types) -> None:
    """A part of a sum that is sent is followed from send to receive, too."""
    module = as_module(types)
    LowerTransfers().run(module)
    SplitTransfers().run(module)
    verify(module)
