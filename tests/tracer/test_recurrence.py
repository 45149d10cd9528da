"""Recurrent layers and cells: values and gradients of plain PyTorch, in graphs of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cg.tracer.errors import TraceError

from ..sampling import examples, scale
from .function_tools import check_equal, trace, trace_vjp
from .layouts.joint_tools import joint_of

pytestmark = pytest.mark.timeout(300)

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "projected LSTM": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}
SHAPES: Sequence[dict[str, Any]] = (
    {"steps": 1},
    {"steps": 7, "is_started": True, "num_layers": 2, "bidirectional": True, "batch_first": True},
    {"steps": 5, "is_started": True, "num_layers": 2, "bias": False, "returns": (1, -1)},
    {"steps": 9, "num_layers": 3, "bidirectional": True, "returns": (0,)},
    {"steps": 4, "is_started": True, "batch_first": True, "returns": (-1,)},
)


class Recurrent(nn.Module):
    """Recurrent layers that start from states, or from zeros, and return some of their results."""

    def __init__(
        self,
        kind: str,
        *,
        is_started: bool = False,
        returns: tuple[int, ...] = (0, 1, -1),
        **options: Any,
    ) -> None:
        super().__init__()
        self.layers = KINDS[kind](3, 4, **options).double()
        self.is_started, self.returns = is_started, returns

    def forward(self, x: Tensor, *states: Tensor) -> list[Tensor]:
        is_pair = isinstance(self.layers, nn.LSTM)
        start = (states if is_pair else states[0]) if self.is_started else None
        hidden, last = self.layers(x, start)
        results = (hidden, *last) if is_pair else (hidden, last)
        return [results[index] for index in dict.fromkeys(i % len(results) for i in self.returns)]

    def arguments(self, steps: int, rows: int = 2) -> list[Tensor]:
        layers = self.layers
        sizes = (rows, steps, 3) if layers.batch_first else (steps, rows, 3)
        count = layers.num_layers * (2 if layers.bidirectional else 1)
        states = [(count, rows, layers.proj_size or 4)]
        states += [(count, rows, 4)] if isinstance(layers, nn.LSTM) else []
        return [numbers(*sizes), *(numbers(*shape) for shape in states if self.is_started)]


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


class Loop(nn.Module):
    """A cell in a Python loop over time."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cell = CELLS[kind](3, 4, **options).double()

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for at_step in x:
            state = self.cell(at_step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states)


@pytest.mark.grid(2)
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("kind", KINDS)
def test_layers_bit_for_bit(kind: str, shape: dict[str, Any]) -> None:
    steps, options = shape["steps"], {k: v for k, v in shape.items() if k != "steps"}
    torch.manual_seed(0)
    actor = Recurrent(kind, **options)
    check_equal(actor, "forward", *actor.arguments(steps))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    steps=st.integers(1, 12),
    rows=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    is_started=st.booleans(),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    returns=st.sampled_from([(0,), (1,), (-1,), (0, 1, -1)]),
)
@examples(24)
def test_layers_of_any_shape(kind: str, steps: int, rows: int, **options: Any) -> None:
    torch.manual_seed(steps)
    actor = Recurrent(kind, **options)
    check_equal(actor, "forward", *actor.arguments(steps, rows), tolerance=1e-12)


@pytest.mark.parametrize("kind", KINDS if scale() > 1 else ("GRU",))
def test_many_steps(kind: str) -> None:
    torch.manual_seed(0)
    actor = Recurrent(kind, num_layers=2)
    check_equal(actor, "forward", *actor.arguments(512 if scale() > 1 else 64))


@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_between_layers(is_training: bool) -> None:
    torch.manual_seed(0)
    actor = Recurrent("LSTM", num_layers=3, dropout=0.4).train(is_training)
    assert trace(actor, "forward", *actor.arguments(5)).declaration.random is is_training
    check_equal(actor, "forward", *actor.arguments(5))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_in_a_loop_bit_for_bit(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    check_equal(Loop(kind, bias=bias), "forward", numbers(6, 2, 3))


def node_count(actor: nn.Module, x: Tensor) -> int:
    outputs = (0,)
    vjp = trace_vjp(actor, "forward", outputs, (0,), x)
    return sum(len(part.only_body.graph_and_lines()[0].nodes) for part in (vjp.first, vjp.second))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_layers_do_not_grow_with_steps(kind: str) -> None:
    actor = Recurrent(kind, num_layers=2, returns=(0,))
    assert node_count(actor, numbers(90, 2, 3)) == node_count(actor, numbers(2, 2, 3))


@pytest.mark.parametrize("kind", CELLS)
def test_graphs_of_cells_grow_by_a_few_operators_a_step(kind: str) -> None:
    two, five = (node_count(Loop(kind), numbers(steps, 2, 3)) for steps in (2, 5))
    assert five - two <= 3 * 40


def test_the_log_of_layers_is_complete_so_that_alike_actors_share_a_trace() -> None:
    actor = Recurrent("GRU", returns=(0,))
    assert joint_of(actor, "forward", (0,), numbers(3, 2, 3)).functions.complete


def test_gradients_of_weights_may_be_put_off() -> None:
    vjp = trace_vjp(Recurrent("LSTM", returns=(0,)), "forward", (0,), (0,), numbers(3, 2, 3))
    input_, weight = (part.only_body.graph_and_lines()[0] for part in vjp.halves)
    late = {"cg.step_products.default", "cg.step_sums.default"}
    assert late.isdisjoint(str(node.target) for node in input_.nodes)
    assert late <= {str(node.target) for node in weight.nodes}


def test_flops_are_those_of_torchs_loop() -> None:
    actor = Recurrent("projected LSTM", returns=(0,))
    x = numbers(3, 2, 3)
    with FlopCounterMode(display=False) as counter:
        actor(x)
    assert trace(actor, "forward", x).declaration.flops.total == counter.get_total_flops()


class Penalized(Recurrent):
    """The gradient of a gradient."""

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        (hidden,) = super().forward(x, *states)
        (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        return slope.square().sum() + hidden.sum()


class Mapped(Recurrent):
    """A transform of `torch.func`."""

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return [torch.func.grad(lambda value: self.layers(value)[0].square().sum())(x)]


class Checkpointed(Recurrent):
    """Layers that the backward runs again."""

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return checkpoint(super().forward, x, *states, use_reentrant=False)


class Cast(Recurrent):
    """Layers under autocast."""

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, *states)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("surroundings", [Penalized, Mapped, Checkpointed])
def test_surroundings(surroundings: type[Recurrent], kind: str) -> None:
    torch.manual_seed(0)
    actor = surroundings(kind, returns=(0,))
    check_equal(actor, "forward", *actor.arguments(3), tolerance=1e-12)


@pytest.mark.parametrize("kind", ["GRU", "tanh"])
def test_autocast(kind: str) -> None:
    # Half precision rounds otherwise where torch's loop runs operator by operator.
    torch.manual_seed(0)
    actor = Cast(kind, returns=(0,)).float()
    x = numbers(3, 2, 3).detach().float().requires_grad_()
    check_equal(actor, "forward", x, tolerance=2e-2)


class Packed(Recurrent):
    def forward(self, x: Tensor, *states: Tensor) -> Any:
        packed = pack_padded_sequence(x, [4, 2])
        return self.layers(packed)[0].data


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(TraceError, match="depends on values") as caught:
        trace(Packed("LSTM"), "forward", numbers(4, 2, 3))
    assert "run over padded sequences" in str(caught.value.remedy)


def test_no_steps_are_an_error_as_in_torch() -> None:
    with pytest.raises(TraceError, match=r"sequence length to be larger than 0|non-empty"):
        trace(Recurrent("GRU"), "forward", numbers(0, 2, 3))
