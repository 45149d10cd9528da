"""What backwards for fused kernels compute again: which results, and how many bytes that saves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.nn import functional

from cg.tracer.function.functions import Functions
from cg.tracer.graph.autodiff.backward_cut import BackwardCut
from cg.tracer.graph.autodiff.recomputation import Recompute, kept_bytes, recomputed
from cg.tracer.graph.autodiff.subgraphs import has_effect, is_view
from cg.tracer.method.joint import Wanted, trace_call
from cg.tracer.method.joint_graph import Joint
from cg.tracer.values.actor_state import collect
from cg.tracer.values.interface import MethodTarget, TracedCall, TracedVjp

from ..sampling import examples
from .function_tools import signature
from .test_functions import rand
from .test_partition import CASES
from .test_split_backward import run

pytestmark = pytest.mark.timeout(120)

WIDTH, HIDDEN = 8, 24
CPU = torch.device("cpu")


class Gated(nn.Module):
    """The feed-forward network of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Norm(nn.Module):
    """A norm in single precision, as models of half precision write it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """A decoder layer of a Llama, with rotary positions."""

    def __init__(self, heads: int = 2, tokens: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.mlp = Norm(), Norm(), Gated()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        angles = torch.arange(tokens)[:, None] * torch.ones(WIDTH // heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-other, one), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True
        )
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Layers(nn.Sequential):
    """Some of them, and a loss."""

    def __init__(self, count: int) -> None:
        super().__init__(*(Layer() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


class Dropping(Gated):
    """A gated network with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        active = functional.silu(self.gate(x))
        return self.down(functional.dropout(active * self.up(x), 0.5))


def joint_of(module: nn.Module, *inputs: Tensor) -> Joint:
    """The joint graph of a module's forward, with the gradients of all inputs that want one."""
    target = MethodTarget("actor", module, "forward")
    call = TracedCall(
        target.name, module.forward, collect(module), signature(*inputs), CPU, None, None
    )
    count = len(trace_call(call).outputs)
    needed = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
    with torch.enable_grad():
        return trace_call(call, Wanted(tuple(range(count)), needed))


def cheap(joint: Joint) -> frozenset[fx.Node]:
    return recomputed(joint, (), Recompute.CHEAP)


def operators(nodes: Sequence[fx.Node]) -> list[str]:
    """The operators of some nodes, views aside."""
    return [
        getattr(node.target, "__name__", str(node.target)) for node in nodes if not is_view(node)
    ]


def again(joint: Joint) -> list[str]:
    """The operators of the forward in the body of the backward, in order."""
    chosen = cheap(joint)
    return operators([node for node in BackwardCut(joint, (), chosen).body if node in chosen])


def test_of_a_gated_network_the_activation_is_computed_again() -> None:
    joint = joint_of(Gated(), rand(4, WIDTH))
    assert again(joint) == ["silu.default"]
    kept = [n for n in joint.graph.nodes if n in BackwardCut(joint, (), cheap(joint)).saved]
    assert operators(kept) == ["i_1", "mm.default", "mm.default", "mul.Tensor"]
    before, after = BackwardCut(joint), BackwardCut(joint, (), cheap(joint))
    assert kept_bytes(before) - kept_bytes(after) == 4 * HIDDEN * 4
    # Right before what needs it first, so that it is nowhere held for long.
    body = operators(after.body)
    assert body[body.index("silu.default") - 1] == "mm.default"
    assert body[body.index("silu.default") + 1] == "mul.Tensor"


def test_casts_are_done_again_and_reductions_are_not() -> None:
    joint = joint_of(nn.Sequential(Norm(), nn.Linear(WIDTH, WIDTH)).bfloat16(), bfloat16(4, WIDTH))
    names = again(joint)
    assert names
    assert set(names) <= {"_to_copy.default", "mul.Tensor"}


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def kept_by_torch(module: nn.Module, x: Tensor) -> int:
    """Bytes that a function compiled by torch keeps for its backward, but for state."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    forwards: list[fx.GraphModule] = []

    def forward(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        forwards.append(graph)
        return graph

    compiled = aot_function(
        lambda values, x: functional_call(module, values, (x,)),
        forward,
        lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        num_params_buffers=len(state),
    )
    compiled(state, x)
    (graph,) = forwards
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    free = {node.meta["val"].untyped_storage()._cdata for node in inputs[: len(state)]}
    (ends,) = graph.graph.output_node().args
    held = {
        node.meta["val"].untyped_storage()._cdata: node.meta["val"].untyped_storage().nbytes()
        for node in ends[1:]  # type: ignore[index, union-attr]
    }
    return sum(size for key, size in held.items() if key not in free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_is_kept_of_llama_layers_than_by_torch(dtype: torch.dtype) -> None:
    module = Layers(2).to(dtype)
    x = torch.randn(2, 6, WIDTH, dtype=dtype).requires_grad_()
    joint = joint_of(module, x)
    before, after = kept_bytes(BackwardCut(joint)), kept_bytes(BackwardCut(joint, (), cheap(joint)))
    assert after < 0.85 * before
    assert after <= kept_by_torch(module, x), (before, after, kept_by_torch(module, x))


CHECKED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    **{name: CASES[name] for name in ("tied", "checkpoint", "convolution")},
    "dropping": (Dropping, (rand(4, WIDTH),)),
    "layers": (lambda: Layers(1), (rand(2, 6, WIDTH),)),
}


def vjp_of(module: nn.Module, inputs: Sequence[Tensor], fused: bool) -> TracedVjp:
    needed = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
    functions, target = Functions(fused=fused), MethodTarget("actor", module, "forward")
    traced = functions.trace(target, signature(*inputs), "f", None)
    outputs = tuple(range(len(traced.declaration.outputs)))
    return functions.trace_vjp(target, signature(*inputs), "f.vjp", outputs, needed, None)


def equal_bits(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Gradients of the backward and of its halves are those without, bit for bit."""
    before = copy.deepcopy(module.state_dict())
    found = []
    for fused, halves in ((False, False), (True, False), (True, True)):
        vjp = vjp_of(module, inputs, fused)
        if halves and vjp.vjp.weight is None:
            continue
        module.load_state_dict(before)
        found.append(run(vjp, module, inputs, halves))
    for values, grads in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(grads, found[0][1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CHECKED)
def test_gradients_are_the_same_bits(case: str) -> None:
    make, inputs = CHECKED[case]
    equal_bits(make(), inputs)


def test_dropout_is_drawn_once() -> None:
    joint = joint_of(Dropping(), rand(4, WIDTH))
    assert again(joint) == ["silu.default"]
    kept = operators(
        [n for n in joint.graph.nodes if n in BackwardCut(joint, (), cheap(joint)).saved]
    )
    assert "empty_like.default" in kept  # the mask, into which random numbers are drawn


class Program(nn.Module):
    """Operators in a row; each takes earlier values, by number."""

    def __init__(self, lines: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.lines = lines
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 1.0]
        for name, i, j in self.lines:
            values.append(OPERATORS[name](self, values[i % len(values)], values[j % len(values)]))
        return torch.stack(values[-3:]).sum(0)


def in_place(module: Program, a: Tensor, b: Tensor) -> Tensor:
    value = a * b
    value.add_(module.scale)
    return value.relu_()


def counted(module: Program, a: Tensor, b: Tensor) -> Tensor:
    seen = module.seen + a.detach().mean(0)
    module.seen.add_(1.0)
    return b * seen


OPERATORS: dict[str, Callable[[Program, Tensor, Tensor], Tensor]] = {
    "sin": lambda m, a, b: a.sin(),
    "silu": lambda m, a, b: functional.silu(a),
    "cast": lambda m, a, b: a.double().tanh().float(),
    "scale": lambda m, a, b: a * m.scale,
    "add": lambda m, a, b: a + b,
    "mul": lambda m, a, b: a.sigmoid() * b,
    "mask": lambda m, a, b: torch.where(a > b, a, 0.5 * b),
    "linear": lambda m, a, b: m.linears[0](a),
    "gelu": lambda m, a, b: functional.gelu(m.linears[1](a)),
    "norm": lambda m, a, b: m.norm(a),
    "softmax": lambda m, a, b: a.softmax(-1) * b,
    "centre": lambda m, a, b: a - b.mean(-1, keepdim=True),
    "drop": lambda m, a, b: functional.dropout(a, 0.5),
    "rotate": lambda m, a, b: torch.cat(tuple(reversed(a.chunk(2, -1))), -1) * b,
    "turn": lambda m, a, b: (a.t() @ b).tanh().mean() * b,
    "in place": in_place,
    "state": counted,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 20), st.integers(0, 20)),
    min_size=3,
    max_size=12,
)


@given(programs)
@examples(12)
def test_random_methods_have_the_same_gradients_and_keep_no_more(
    lines: list[tuple[str, int, int]],
) -> None:
    module, x = Program(lines), rand(4, WIDTH)
    joint = joint_of(module, x)
    chosen = cheap(joint)
    assert not any(map(has_effect, chosen))
    assert not {"mm.default", "addmm.default"} & set(operators(list(chosen)))
    assert kept_bytes(BackwardCut(joint, (), chosen)) <= kept_bytes(BackwardCut(joint))
    equal_bits(module, (x,))
