"""Errors of steps that misuse their values: each names the user's line and a remedy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch

from cg.tracer.errors import TraceError
from cg.tracer.record.intrinsics.microbatches import mean, microbatches

from .step_tools import Bench, line_of, refusal

X = torch.ones(4, 4)
REAL = torch.ones(4, 4)
MODULE = torch.nn.Linear(4, 4)
ARRAY = np.ones((4, 4))
GENERATOR = torch.Generator()


@pytest.fixture
def bench() -> Bench:
    return Bench(2)


BANNED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x.sum().item(), r"item\(\) needs elements of a value"),
    (lambda x: float(x.sum()), r"float\(\) of a tensor needs elements"),
    (lambda x: int(x.sum()), r"int\(\) of a tensor needs elements"),
    (lambda x: complex(x.sum()), r"complex\(\) of a tensor needs elements"),
    (lambda x: math.sqrt(x.sum()), r"float\(\) of a tensor needs elements"),
    (lambda x: list(range(x.sum())), r"a tensor as an index of a Python sequence"),
    (lambda x: [1, 2][x.sum()], r"a tensor as an index of a Python sequence"),
    (lambda x: x.tolist(), r"tolist\(\) needs elements"),
    (lambda x: x.numpy(), r"numpy\(\) needs elements"),
    (lambda x: np.asarray(x), r"a numpy function on a tensor needs elements"),
    (lambda x: 1 if x.sum() > 0 else 2, r"a decision on a tensor \(if, while, and, or, not\)"),
    (lambda x: x.sum() > 0 and x, r"a decision on a tensor"),
    (lambda x: 3 in x, r"'in' on a tensor needs elements"),
    (lambda x: torch.equal(x, x), r"equal\(\) needs elements of a value to decide"),
    (lambda x: torch.allclose(x, x), r"allclose\(\) needs elements of a value to decide"),
    (lambda x: print(x), r"the text of a tensor needs elements of a value to write"),
    (lambda x: f"{x}", r"the text of a tensor needs elements"),
    (lambda x: f"{x.sum():.2f}", r"the text of a tensor needs elements"),
    (lambda x: str(x), r"the text of a tensor needs elements"),
    (lambda x: x.nonzero(), r"nonzero\(\) makes a value whose shape depends on elements"),
    (lambda x: x[x > 0], r"an index makes a value whose shape depends on elements"),
    (lambda x: torch.where(x > 0), r"where\(\) makes a value whose shape depends"),
    (lambda x: x.unique(), r"unique\(\) makes a value whose shape depends"),
    (lambda x: torch.masked_select(x, x > 0), r"masked_select\(\) makes a value whose shape"),
    (lambda x: x[: x.sum()], r"an index takes a slice whose bounds are tensors"),
    (lambda x: x.sum().backward(), r"backward\(\) would differentiate now"),
    (lambda x: torch.autograd.backward(x.sum()), r"backward\(\) would differentiate now"),
    (lambda x: torch.autograd.grad(x.sum(), x), r"grad\(\) asks autograd about a value"),
    (lambda x: x.grad, r"\.grad of a tensor asks autograd about a value"),
    (lambda x: x.grad_fn, r"\.grad_fn of a tensor asks autograd"),
    (lambda x: x.retain_grad(), r"retain_grad\(\) asks autograd"),
    (lambda x: x.requires_grad_(), r"requires_grad_\(\) would make a new leaf"),
    (lambda x: setattr(x, "requires_grad", True), r"an assignment to \.requires_grad of a tensor"),
    (lambda x: setattr(x, "data", x), r"an assignment to \.data of a tensor would share memory"),
    (lambda x: torch.nn.Parameter(x), r"requires_grad_\(\) would make a new leaf"),
    (lambda x: torch.zeros(2, requires_grad=True), r"zeros\(\) with requires_grad=True"),
    (lambda x: x.register_hook(print), r"register_hook\(\) would run Python in the backward"),
    (lambda x: x.data, r"\.data of a tensor would share memory"),
    (lambda x: x.data_ptr(), r"data_ptr\(\) asks for the memory of a value"),
    (lambda x: x.untyped_storage(), r"untyped_storage\(\) asks for the memory"),
    (lambda x: x.stride(), r"stride\(\) asks for the memory layout"),
    (lambda x: x.is_contiguous(), r"is_contiguous\(\) asks for the memory layout"),
    (lambda x: x.cuda(), r"cuda\(\) names a device"),
    (lambda x: x.cpu(), r"cpu\(\) names a device"),
    (lambda x: x.to("cuda"), r"to\(\) names a device"),
    (lambda x: x.to(device="cpu"), r"to\(\) names a device"),
    (lambda x: x.to(x.device), r"to\(\) names a device"),
    (lambda x: torch.zeros(2, device="cuda"), r"zeros\(\) names the device cuda"),
    (lambda x: copy.deepcopy(x), r"__deepcopy__\(\) would copy the Python object"),
    (lambda x: torch.tensor([x.sum(), 1]), r"tensor\(\) reads the elements of what it is given"),
    (lambda x: torch.add(x, x, out=x), r"add\(\) with out= writes into a tensor"),
    (lambda x: torch.rand_like(x, generator=GENERATOR), r"rand_like\(\) with generator= draws"),
    (lambda x: (x * 1).squeeze_(), r"squeeze_\(\) would change the shape of a value in place"),
    (lambda x: x + REAL, r"add\(\) takes a real tensor, float32\[4,4\]"),
    (lambda x: REAL.sum(), r"sum\(\) takes a real tensor"),
    (lambda x: REAL.item(), r"item\(\) takes a real tensor"),
    (lambda x: x + torch.Tensor([1.0]), r"add\(\) takes a real tensor"),
    (lambda x: REAL.add_(x), r"add_\(\) takes a real tensor"),
    (lambda x: MODULE(x), r"linear\(\) takes a parameter of a module, float32\[4,4\]"),
    (lambda x: x + torch.from_numpy(ARRAY), r"add\(\) takes a real tensor, float64\[4,4\]"),
    (lambda x: torch.tensor(ARRAY), r"tensor\(\) takes a numpy array of shape \(4, 4\)"),
    (
        lambda x: torch.sparse_coo_tensor(size=(2, 2), check_invariants=True),
        r"makes a tensor that is not dense",
    ),
    (
        lambda x: torch.zeros(2, dtype=torch.float8_e4m3fnuz),
        r"torch.float8_e4m3fnuz is not supported",
    ),
    (
        lambda x: torch.nn.functional.embedding(x.long(), x, max_norm=1.0),
        r"embedding\(\) with max_norm= writes to its weight",
    ),
    (
        lambda x: torch.nn.functional.batch_norm(x, x[0], x[0], training=True),
        r"batch_norm\(\) would update running statistics in place",
    ),
]


@pytest.mark.parametrize(
    ("step", "message"), BANNED, ids=lambda v: v[:40] if type(v) is str else ""
)
def test_a_step_cannot(bench: Bench, step: Callable[[Any], Any], message: str) -> None:
    error = refusal(bench, step, X)
    with pytest.raises(TraceError, match=message):
        raise error
    assert error.loc is not None
    code = step.__code__
    last = max(line for _, _, line in code.co_lines() if line is not None)
    assert code.co_firstlineno <= error.loc.line <= last


def test_the_message_has_reason_line_and_remedy(bench: Bench) -> None:
    def step(x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x

    error = refusal(bench, step, X)
    assert line_of(error) == "if x.sum() > 0:"
    lines = str(error).splitlines()
    assert lines[0].startswith("a decision on a tensor")
    assert lines[1].startswith(f"  at {__file__}:")
    assert lines[1].endswith(", in step")
    assert lines[2].startswith("  help: use torch.where, decide by a static argument of the step")


def test_what_torch_raises_is_told(bench: Bench) -> None:
    message = "@torch.reshape raised RuntimeError .*: shape .* is invalid for input of size 16"
    with pytest.raises(TraceError, match=message):
        bench.trace(lambda x: x.reshape(3), X)


def test_real_tensors_may_be_looked_at_but_not_used(bench: Bench) -> None:
    def step(x: Any) -> Any:
        return x, str((tuple(REAL.shape), MODULE.weight.dtype, str(REAL)))

    _, seen = bench.trace(step, X).outputs.rebuild([X])
    assert seen == str(((4, 4), torch.float32, str(REAL)))


def test_writes_that_change_the_type(bench: Bench) -> None:
    def step(x: Any) -> Any:
        h = x + 1
        h.resize_as_(x)

    assert "asks for the memory of a value" in refusal(bench, step, X).reason

    def into_real(x: Any) -> Any:
        REAL[0] = x[0]

    assert "takes a real tensor" in refusal(bench, into_real, X).reason


def test_values_do_not_outlive_their_step(bench: Bench) -> None:
    kept: ContextVar[Any] = ContextVar("kept")  # where nobody looks

    def step(x: Any) -> Any:
        kept.set(x + 1)
        return x

    bench.trace(step, X)
    escaped = kept.get()
    with pytest.raises(TraceError, match="a value of a traced step, outside of that step") as info:
        escaped + 1
    assert "return it from the step" in info.value.remedy
    assert repr(escaped) == "<value %add of a traced step: f32[4,4]@{0..1}>"
    error = refusal(bench, lambda x: x + escaped, X)
    assert error.reason.startswith("this step uses a value of a traced step, outside of that step")


def test_seeding_inside_a_step(bench: Bench) -> None:
    def step(x: Any) -> Any:
        torch.manual_seed(0)
        return x

    torch.rand(1)
    error = refusal(bench, step, X)
    assert "seeded or drew from torch's global generator" in error.reason


def test_microbatches_that_do_not_come_out_even(bench: Bench) -> None:
    y = torch.ones(6, 2)
    cases: list[tuple[Callable[[Any, Any], Any], str]] = [
        (lambda x, y: microbatches(x, 3), "a batch of 4 into 3 equal parts"),
        (lambda x, y: microbatches({"x": x, "y": y}, 2), r"0 is 4 in \['x'\], but 6 in \['y'\]"),
        (lambda x, y: microbatches((x, 3), 2), r"cuts tensors, \[1\] is int"),
        (lambda x, y: microbatches(x.sum(), 2), "the tensor has no dimension"),
        (lambda x, y: microbatches((None, []), 2), "cg.microbatches of no tensor"),
        (lambda x, y: microbatches(x, 0), "cg.microbatches into 0 parts"),
        (lambda x, y: list(microbatches(REAL, 2)), "cg.microbatches of a real tensor"),
    ]
    for step, message in cases:
        with pytest.raises(TraceError, match=message):
            raise refusal(bench, step, X, y)


def test_nested_microbatches(bench: Bench) -> None:
    def step(x: Any) -> Any:
        for part in microbatches(x, 2):
            for small in microbatches(part, 2):
                x = x + small
        return x

    error = refusal(bench, step, X)
    assert error.reason == "cg.microbatches inside a loop over other microbatches"
    assert "for x, y in cg.microbatches((x, y), n)" in error.remedy


def test_the_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"cg.mean of no values; give it at least one tensor"):
        mean([])
