"""Tensors that are saved between forward and backward, and the memory of the bodies."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cg.ir.attributes import Effect

from .function_tools import trace, trace_vjp
from .test_functions import Block, TiedLanguageModel, rand

pytestmark = pytest.mark.timeout(120)


class FourOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.block(x)
        return h, h.mean(), torch.tanh(h), h.view(-1)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat([self.block(x), skip], dim=-1))


def frozen() -> nn.Module:
    block = Block()
    block.norm1.requires_grad_(False)
    block.qkv.requires_grad_(False)
    return block


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))


TOKENS = torch.randint(17, (2, 5))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        (rand(2, 6, 32),),
    ),
    "block": (Block, (rand(2, 6, 32),)),
    "dropout": (lambda: Block(dropout=0.1), (rand(2, 6, 32),)),
    "frozen": (frozen, (rand(2, 6, 32),)),
    "tied": (TiedLanguageModel, (TOKENS, TOKENS.roll(1, 1))),
    "four outputs": (FourOutputs, (rand(2, 6, 32),)),
    "skip": (Skip, (rand(2, 6, 32), rand(2, 6, 32))),
    "checkpoint": (Checkpointed, (rand(2, 6, 32),)),
    "convolution": (conv, (rand(2, 3, 9, 9),)),
}


def storages(values: Any) -> dict[int, int]:
    return {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for v in values
        if isinstance(v, torch.Tensor)
    }


def saved_by_eager(actor: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes that autograd keeps, parameters and buffers excepted."""
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        outputs = actor(*inputs)
    state = storages([*actor.parameters(), *actor.buffers()])
    del outputs
    return sum(size for key, size in storages(kept).items() if key not in state)


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_saved_than_by_eager_autograd(case: str) -> None:
    make, inputs = CASES[case]
    actor = make()
    count = len(trace(actor, "forward", *inputs).declaration.outputs)
    needed = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
    vjp = trace_vjp(actor, "forward", tuple(range(count)), needed, *inputs)
    result = vjp.first.only_body(*[x.detach() for x in inputs])
    saved = result[count:]
    state = storages([*actor.parameters(), *actor.buffers()])
    assert not set(storages(saved)) & set(state)
    assert len(storages(saved)) == len(saved)
    assert sum(storages(saved).values()) <= saved_by_eager(actor, inputs)
    for value, type_ in zip(saved, vjp.first.declaration.outputs[count:], strict=True):
        assert tuple(value.shape) == type_.shape  # type: ignore[union-attr]
    assert vjp.second.declaration.inputs[: len(saved)] == vjp.first.declaration.outputs[count:]


def test_saved_inputs_are_aliases() -> None:
    x = rand(5, 8)
    vjp = trace_vjp(nn.Linear(8, 4), "forward", (0,), (0,), x)
    assert vjp.first.declaration.aliases == ((1, 0),)
    assert len(vjp.first.declaration.outputs) == 2
    given = x.detach()
    assert vjp.first.only_body(given)[1] is given


def test_effects_of_the_backward() -> None:
    x = rand(5, 8)
    net = nn.Linear(8, 4)
    assert trace_vjp(net, "forward", (0,), (0,), x).second.declaration.effect is Effect.ACCUMULATE
    net.requires_grad_(False)
    assert trace_vjp(net, "forward", (0,), (0,), x).second.declaration.effect is Effect.ACCUMULATE
    assert trace_vjp(nn.Tanh(), "forward", (0,), (0,), x).second.declaration.effect is Effect.PURE


def test_forward_and_vjp_forward_draw_the_same_random_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            torch.rand(3)
            h = functional.dropout(self.linear(x), 0.5)
            functional.dropout(x, 0.5)
            return h, torch.rand(4)

    actor, x = Noisy(), rand(5, 8)
    traced = trace(actor, "forward", x)
    vjp = trace_vjp(actor, "forward", (0,), (0,), x)
    assert traced.declaration.random
    assert vjp.first.declaration.random
    assert not vjp.second.declaration.random
    results = []
    for function in (traced.body, vjp.first.only_body, actor):
        torch.manual_seed(0)
        results.append([*function(x.detach())[:2], torch.rand(1)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_values_are_dropped_after_their_last_use() -> None:
    """A body holds no more intermediate values at once than a chain of operations needs."""

    class Deep:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = x * 2 + 1
            return x

    body = trace(Deep(), "forward", torch.ones(1000)).body
    alive: list[int] = []

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            frame = sys._getframe(1)
            alive.append(sum(isinstance(v, torch.Tensor) for v in frame.f_locals.values()))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Counter():
        body(torch.ones(1000))
    assert len(alive) >= 12
    assert max(alive) <= 2


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        shifted = tokens + 1
        return self.embed(shifted).tanh()


def test_an_error_at_run_time_names_the_users_line() -> None:
    body = trace(Fails(), "forward", torch.zeros(2, dtype=torch.int64)).body
    with pytest.raises(IndexError) as caught:
        body(torch.tensor([1, 7]))
    loc = body.locate(caught.value.__traceback__)  # type: ignore[attr-defined]
    assert loc is not None
    assert loc.file == __file__
    with open(__file__, encoding="utf-8") as source:
        assert "self.embed(shifted)" in source.readlines()[loc.line - 1]
    assert "embedding" in "".join(traceback.format_exception(caught.value))
    assert body.locate(None) is None  # type: ignore[attr-defined]


def test_nodes_of_the_backward_have_the_line_of_their_forward() -> None:
    vjp = trace_vjp(Fails(), "forward", (0,), (), torch.zeros(2, dtype=torch.int64))
    saved = list(vjp.first.only_body(torch.tensor([0, 1]))[1:])
    with pytest.raises(RuntimeError) as caught:
        vjp.second.only_body(*saved, torch.ones(7, 7))
    loc = vjp.second.only_body.locate(caught.value.__traceback__)  # type: ignore[attr-defined]
    with open(__file__, encoding="utf-8") as source:
        assert loc is not None
        assert ".tanh()" in source.readlines()[loc.line - 1]


def test_values_in_constants() -> None:
    """Non-finite numbers, dtypes and the like survive code generation."""

    class Constants:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.masked_fill(x > 0, float("-inf")).clamp(max=float("inf"))
            return torch.full_like(y, 0.1, dtype=torch.float64) + y.to(torch.float64)

    x = torch.tensor([-1.0, 1.0])
    assert torch.equal(trace(Constants(), "forward", x).body(x)[0], Constants().forward(x))


def test_attention_is_random_only_with_dropout() -> None:
    x = rand(2, 6, 32)
    assert not trace(Block(), "forward", x).declaration.random
    assert trace(Block(dropout=0.1), "forward", x).declaration.random
