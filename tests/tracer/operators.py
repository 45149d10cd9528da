"""Operators of torch in traced methods, forward and backward, against eager autograd.

    python -m tests.tracer.operators [--only NAME] [--record tests/tracer/operators.json]

Samples are those of torch's own tests. The page of the reference is made of the record. An operator
with any call that is wrong is not in it, but printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree

from cg.tracer.errors import TraceError

from .function_tools import assert_same_run, run_eager, runs_of, tensors, trace

SAMPLES = 1
"""How many samples of an operator are tried, each in two layouts; those of most dimensions."""
LARGEST = 20_000
"""Elements of a sample that is not too large."""
TOLERANCE = 1e-5

UNDEFINED = frozenset(
    {
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
        *("new_empty_strided", "resize_", "resize_as_"),
    }
)
"""Operators whose results hold whatever is in memory."""


def operators() -> list[Any]:
    """What torch's own tests know of its operators, one variant of each name.

    Raises:
        ImportError: torch's tests cannot be imported.
    """
    try:
        import expecttest  # noqa: F401
    except ImportError:
        # It is a base class of torch's tests, none of which runs here.
        module: Any = ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=name_of)


def name_of(operator: Any) -> str:
    """The name of an operator, with that of its variant."""
    variant = operator.variant_test_name
    return f"{operator.name}.{variant}" if variant else str(operator.name)


@dataclass
class Outcome:
    """What has come of an operator.

    Attributes:
        tried: calls of it that eager PyTorch can do.
        equal: those with equal values and gradients.
        refused: the reasons of cg's errors, with how many there were.
        wrong: what is neither, in words.
    """

    tried: int = 0
    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        """What the record says of it."""
        refused = dict(sorted(self.refused.items()))
        return {"tried": self.tried, "equal": self.equal, "refused": refused}


class Method:
    """An actor whose method calls an operator.

    Args:
        operator: the operator.
        leaves, spec: its arguments; None stands for each tensor that the method is given.
        is_turned: whether tensors are given, and results looked at, with dimensions exchanged.
    """

    def __init__(self, operator: Any, leaves: list[Any], spec: Any, is_turned: bool) -> None:
        self.call = lambda *args, **kwargs: operator(*args, **kwargs)
        self.leaves, self.spec, self.is_turned = leaves, spec, is_turned

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        supply = map(turned, values) if self.is_turned else iter(values)
        leaves = [next(supply) if leaf is None else leaf for leaf in self.leaves]
        (first, args), kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = tensors(self.call(first, *args, **kwargs))
        return [turned(value).contiguous() for value in results] if self.is_turned else results


def turned(value: torch.Tensor) -> torch.Tensor:
    """The tensor with its first and its last dimension exchanged."""
    return value.transpose(0, -1) if value.dim() > 1 else value


def _dimensions(sample: Any) -> int:
    values = tensors((sample.input, sample.args, sample.kwargs))
    return sum(value.dim() for value in values if value.numel())


def methods(operator: Any, count: int) -> Iterator[tuple[Method, list[torch.Tensor]]]:
    """Methods that call an operator, each with the tensors to give it."""
    known = operator.dtypes
    dtype = next(
        (d for d in (torch.float64, torch.float32, torch.complex128, torch.int64) if d in known),
        None,
    )
    if dtype is None:
        return
    wants = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = operator.sample_inputs("cpu", dtype, requires_grad=wants)
    first = sorted(itertools.islice(samples, 8), key=_dimensions, reverse=True)
    for sample in first[:count]:
        leaves, spec = pytree.tree_flatten(((sample.input, sample.args), sample.kwargs))
        values = [v for v in leaves if isinstance(v, torch.Tensor)]
        if any(value.layout is not torch.strided for value in values):
            continue  # a step takes dense tensors alone
        if sum(value.numel() for value in values) > LARGEST:
            continue
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for is_turned in (False, True):
            inputs = [
                (turned(v) if is_turned else v).detach().clone().requires_grad_(v.requires_grad)
                for v in values
            ]
            yield (
                Method(operator.op, leaves, spec, is_turned),
                [v.contiguous().detach().requires_grad_(v.requires_grad) for v in inputs],
            )


def outcome_of(operator: Any, count: int = SAMPLES) -> Outcome:
    """Try an operator."""
    outcome = Outcome()
    if name_of(operator).partition(".")[0] in UNDEFINED:
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, values in methods(operator, count):
            _try(outcome, method, values)
    return outcome


def _try(outcome: Outcome, method: Method, values: Sequence[torch.Tensor]) -> None:
    try:
        torch.manual_seed(3)
        expected = run_eager(method, "forward", list(values), {}, 3)
    except Exception:
        return  # eager PyTorch cannot do it
    if not expected.outputs:
        return
    outcome.tried += 1
    try:
        traced = trace(method, "forward", *values)
        torch.manual_seed(3)
        body: Any = traced.body
        first = body(*(value.detach() for value in values))
        if traced.declaration.random:
            # Eager PyTorch may draw in another order.
            kinds = [[(v.shape, v.dtype) for v in many] for many in (first, expected.outputs)]
            assert kinds[0] == kinds[1], kinds
            outcome.equal += 1
            return
        _compare(first, expected.outputs)
        if any(spec.requires_grad for spec in _specs(traced)):
            run = runs_of(traced, method, "forward", list(values), {})
            for _ in range(2):  # the second one does not compare strides any more
                assert_same_run(run(3), expected, TOLERANCE)
    except TraceError as error:
        outcome.refused[reason_of(error)] += 1
    except Exception as error:
        how = "turned: " if method.is_turned else ""
        outcome.wrong.append(f"{how}{type(error).__name__}: {str(error).strip()[:400]}")
    else:
        outcome.equal += 1


def _specs(traced: Any) -> list[Any]:
    return [traced.results.leaves[i] for i in traced.results.values]


def _compare(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def reason_of(error: TraceError) -> str:
    """The reason of a refusal, without what differs from sample to sample."""
    reason = error.reason.removeprefix("Method.forward cannot be traced: ")
    reason = re.sub(r"\(torch\.Size.*?\)\)|\[[^]]*\]|0x[0-9a-f]+", "…", reason)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "N", reason))[:160]


def _write(path: Path, records: dict[str, Any]) -> None:
    version = torch.__version__.partition("+")[0]
    lines = [f"  {json.dumps(name)}: {json.dumps(records[name])}" for name in sorted(records)]
    text = f'{{"torch": "{version}", "operators": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text, encoding="utf-8")


def main(attempt: Callable[[Any], Outcome] = outcome_of) -> int:
    """Try operators; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", default="0/1", help="NUMBER/COUNT: a share of the operators")
    parser.add_argument("--record", type=Path, help="write what has come of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, count = map(int, options.share.split("/"))
    chosen = [op for op in operators() if options.only in name_of(op)][number::count]
    records: dict[str, Any] = {}
    wrongs = 0
    for operator in chosen:
        outcome = attempt(operator)
        wrongs += len(outcome.wrong)
        name = name_of(operator)
        if not outcome.wrong:
            records[name] = outcome.as_record()
        for wrong in outcome.wrong:
            print(f"WRONG {name}: {wrong}", flush=True)
        if options.record:
            # As far as it has come, should it be interrupted.
            _write(options.record, records)
    print(f"{len(records)} operators, {sum(o['tried'] for o in records.values())} calls tried")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
