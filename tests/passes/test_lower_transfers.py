"""Lowered transfers: what they keep, and that no op of them can be left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cg.ir.location import Location
from cg.ir.ops import AllGather, AllReduce, Assemble, Call, Op, ReduceScatter, Transfer, Value
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.types import Place
from cg.ir.verify.verifier import verify
from cg.passes.placement.lower_transfers import LowerTransfers
from cg.passes.placement.resharding import plan

from ..sampling import examples, scaled
from .random_transfers import Types, as_module, is_valid, messages_of, transfers

LINE = Location("step.py", 7, "y = cg.transfer(x)")


def lowered(types: Types, via: str | None = None) -> Module:
    """A placed module with one transfer, after the pass."""
    module = as_module(types)
    (transfer,) = (op for op in module.program.ops if isinstance(op, Transfer))
    transfer.loc, transfer.mb, transfer.via = LINE, 3, via
    verify(module)
    assert LowerTransfers().run(module)
    return module


@examples(300, shrinks=True)
@given(types=transfers(), via=st.sampled_from((None, "nccl")))
def test_a_lowered_transfer_is_a_program_of_the_planned_messages(
    types: Types, via: str | None
) -> None:
    assume(is_valid(types))
    module = lowered(types, via)
    verify(module)
    found = plan(*types)
    made = [op for op in module.program.ops if isinstance(op, Transfer)]
    assert [(op.operands[0].type.place, op.result.type.place) for op in made] == [
        (Place.of(message.source), Place.of(message.target)) for message in messages_of(found)
    ]
    for op in new_ops(module):
        assert (op.loc, op.mb) == (LINE, 3)
        if isinstance(op, Transfer | AllGather | AllReduce | ReduceScatter):
            assert op.via == via


def new_ops(module: Module) -> list[Op]:
    """The ops that stand for the transfer."""
    return [op for op in module.program.ops if op.mb == 3]


REMOVED = (AllReduce, ReduceScatter, Call, AllGather, Assemble)
"""Kinds of ops of which a mutant lacks one: reductions, by collectives or calls, and gathers."""
WANTED = {"reduction": 400, "all_gather": 20, "assemble": 200}
"""Mutants at least, by what they lack."""
MOST = 4
"""Mutants of one program that lack ops of the same kind."""


def test_a_program_that_lacks_a_reduction_or_a_gather_is_refused() -> None:
    count: Counter[str] = Counter()

    @examples(1200)
    @given(types=transfers(), seed=st.integers(0, 10**6))
    def judge(types: Types, seed: int) -> None:
        assume(is_valid(types))
        module = lowered(types)
        rng = random.Random(seed)
        for kind in REMOVED:
            numbers = [
                number
                for number, op in enumerate(module.program.ops)
                if op.mb == 3 and isinstance(op, kind) and op.operands[1:]
            ]
            for number in rng.sample(numbers, min(len(numbers), MOST)):
                mutant = without(module, number, rng.choice)
                with pytest.raises(IRError):
                    verify(mutant)
                opcode = kind.opcode
                count[opcode if opcode in WANTED else "reduction"] += 1

    judge()
    assert all(count[kind] >= scaled(wanted) for kind, wanted in WANTED.items()), count


def without(module: Module, number: int, choice: Callable[[Sequence[Value]], Value]) -> Module:
    """A copy of a module with an operand of one op in the place of each of its results."""
    mutant = clone(module)
    op = mutant.program.ops.pop(number)
    operand = choice(op.operands)
    for other in mutant.program.ops:
        other.operands = tuple(operand if v in op.results else v for v in other.operands)
    return mutant
