"""A traced step from which any reduction or gather is left out is refused, before it is lowered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import cg
from cg.ir.ops import Transfer
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.types import TensorType
from cg.ir.verify.verifier import verify
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.tracer.values.plan import AttentionForm

from ...worlds import virtual_world
from .training import (
    PLANS,
    Attention,
    Block,
    Language,
    LongAttention,
    Mlp,
    Model,
    Written,
    batch,
    meshes,
    step_of,
)

WANTED = 16
"""Mutants of a model, on the average."""

Case = tuple[type[Any], str, bool, AttentionForm | None]

CASES: list[Case] = [
    (Mlp, "pp-dp-tp", False, None),
    (Attention, "tp-dp", False, None),
    (LongAttention, "dp", False, None),  # gathers keys and values
    (LongAttention, "dp-tp", True, None),  # exchanges rows for heads
    (LongAttention, "dp", False, "ring"),
    (Written, "pp-dp-tp", True, None),
    (Language, "tp-dp", True, None),
]
MORE: list[Case] = [
    (Block, "dp-tp", True, None),
    (Block, "overlap", False, None),
    (LongAttention, "dp-tp", True, "ring"),
    (Written, "dp-tp", False, None),
    (Language, "dp-tp", False, None),
]
"""A class of stages, their meshes, whether parameters are stored in pieces, and the form of
attention."""

_world = virtual_world(8, threads=1)


def traced(
    cls: type[Any], name: str, is_stored: bool, attention: AttentionForm | None = None
) -> Module:
    places = meshes(name)
    model = Model([(cls, (seed,)) for seed in range(len(places))])
    plans = [cg.plan(PLANS[cls], attention=attention)] * len(places)
    stages = model.on(places, plans, cg.cut(0, "dp") if is_stored else cg.whole)
    kind = {Language: "words", Mlp: "integers"}.get(cls, "reals")
    return cg.trace(step_of(stages, 2)).lower(*batch(0, 12, kind)).trace.module


def programs(module: Module) -> list[Program]:
    """Those of the step and of the functions that are programs."""
    return [*module.programs, *module.bodies.values()]


def without(module: Module, program: int, at: int) -> Module:
    """A copy of a module that uses what a transfer takes in the place of what it gives."""
    mutant = clone(module)
    ops = programs(mutant)[program].ops
    transfer = ops.pop(at)
    (operand,) = transfer.operands
    for op in ops:
        op.operands = tuple(operand if v in transfer.results else v for v in op.operands)
    return mutant


def refused_by_passes(mutant: Module) -> None:
    PassManager(default_pipeline()).run(mutant)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_each_reduction_and_each_gather_is_needed(cases: list[Case]) -> None:
    count: Counter[str] = Counter()
    for case in cases:
        module = traced(*case)
        verify(module)
        for number, program in enumerate(programs(module)):
            for at, op in enumerate(program.ops):
                if not isinstance(op, Transfer) or not any(
                    value in user.operands for user in program.ops for value in op.results
                ):
                    continue
                have, made = op.operands[0].type, op.result.type
                assert isinstance(have, TensorType)
                assert isinstance(made, TensorType)
                if have.layout is None and made.layout is None:
                    continue  # a copy, which travels without being asked to
                mutant = without(module, number, at)
                # To bring what is laid out to an equal mesh is neither; the passes refuse that.
                check = refused_by_passes if have.layout == made.layout else verify
                with pytest.raises(IRError):
                    check(mutant)
                sums = have.layout is not None and have.layout.summands
                count["reductions" if sums else "others"] += 1
    assert count.total() >= WANTED * len(cases), count
    assert count["reductions"] >= WANTED // 2 * len(cases), count


def test_a_sum_that_nobody_reduces_is_named_with_its_line() -> None:
    """Users cannot write one: each op of a method that takes no sum gets it reduced."""
    module = traced(Mlp, "dp-tp", False)
    programs_with_sums = [
        (number, at)
        for number, program in enumerate(programs(module))
        for at, op in enumerate(program.ops)
        if isinstance(op, Transfer) and isinstance(op.operands[0].type, TensorType)
        if (layout := op.operands[0].type.layout) is not None and layout.summands == ("tp",)
    ]
    number, at = programs_with_sums[0]
    with pytest.raises(IRError) as caught:
        verify(without(module, number, at))
    message = str(caught.value)
    assert "|+tp], but" in message
    assert "training.py" in message
    assert "a transfer changes the layout: %y = transfer(" in message
