"""Traced methods compute what eager autograd computes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .function_tools import check_equal, run_traced, trace, trace_vjp

pytestmark = pytest.mark.timeout(120)


def rand(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (a.view(b, t, self.heads, c // self.heads).transpose(1, 2) for a in (q, k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.drop.p if self.training else 0.0
        )
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            self.head(self.embed(tokens)).flatten(0, 1), targets.flatten()
        )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())


@pytest.mark.parametrize("grad", [True, False])
def test_mlp(grad: bool) -> None:
    check_equal(mlp(), "forward", rand(5, 8, grad=grad))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_transformer_block(dropout: float) -> None:
    check_equal(Block(dropout=dropout), "forward", rand(2, 6, 32))


def test_convolution_and_batch_norm() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    check_equal(net, "forward", rand(2, 3, 9, 9))


def test_batch_norm_in_eval_mode() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    check_equal(net, "forward", rand(2, 3, 9, 9))
    assert trace(net, "forward", rand(2, 3, 9, 9)).declaration.effect.value == "read"


def test_tied_weights_and_integer_inputs() -> None:
    tokens = torch.randint(17, (2, 5))
    check_equal(TiedLanguageModel(), "forward", tokens, tokens.roll(1, 1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_network(kind: type[nn.Module]) -> None:
    # Fused kernels are traced as the operations that they fuse.
    check_equal(kind(4, 6, num_layers=2), "forward", rand(5, 3, 4), tolerance=1e-6)


def test_multihead_attention() -> None:
    q, k, v = rand(2, 5, 16), rand(2, 7, 16), rand(2, 7, 16)
    check_equal(nn.MultiheadAttention(16, 4, batch_first=True), "forward", q, k, v)


class Many(nn.Module):
    """Several outputs: some differentiable, one a view of an input, one an input, one constant."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> dict[str, Any]:
        h = self.frozen(self.used(x))
        return {
            "h": h,
            "pair": (h.sum(), x.view(-1)),
            "same": x,
            "count": n + 1,
            "detached": h.detach() * 2,
            "name": "many",
            "none": None,
        }


def test_many_outputs() -> None:
    x, y, n = rand(3, 4), rand(2, 4), torch.arange(3)
    check_equal(Many(), "forward", x, y, n)
    traced = trace(Many(), "forward", x, y, n)
    flags = [
        leaf.requires_grad for leaf in (traced.results.leaves[i] for i in traced.results.values)
    ]
    assert flags == [v.requires_grad for v in _values(Many()(x, y, n))]
    result = traced.results.fill(range(len(flags)))
    assert (result["name"], result["none"]) == ("many", None)
    assert (2, 0) in traced.declaration.aliases
    assert (3, 0) in traced.declaration.aliases


def _values(result: dict[str, Any]) -> list[torch.Tensor]:
    return [result["h"], *result["pair"], result["same"], result["count"], result["detached"]]


def test_an_input_or_a_parameter_that_no_output_depends_on_has_no_gradient() -> None:
    actor = Many()
    run = run_traced(actor, "forward", (rand(3, 4), rand(2, 4), torch.arange(3)), {}, 0)
    assert run.input_grads[1] is None
    assert run.grads["unused.weight"] is None
    assert run.grads["frozen.weight"] is None


def test_masks_choose_outputs_and_inputs() -> None:
    actor = Many()
    x, y, n = rand(3, 4), rand(2, 4), torch.arange(3)
    vjp = trace_vjp(actor, "forward", (1,), (), x, y, n)
    result = vjp.first.only_body(x.detach(), y.detach(), n)
    assert vjp.second.only_body(*result[6:], torch.tensor(2.0)) == (None,)  # a unit
    grads = torch.autograd.grad(actor(x, y, n)["pair"][0], list(actor.used.parameters()))
    assert torch.equal(actor.used.weight.grad, 2 * grads[0])


class Plain:
    """No module itself; modules and tensors in attributes, a list, a dict and a tuple."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.heads = {"a": nn.Linear(4, 2)}
        self.scale = torch.full((4,), 0.5)
        self.weight = torch.ones(4, requires_grad=True)
        self.pair = (torch.ones(4), [torch.zeros(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return self.heads["a"](x * self.weight + self.pair[0] + self.pair[1][0])


def test_plain_class() -> None:
    actor = Plain()
    check_equal(actor, "forward", rand(3, 4))
    run_traced(actor, "forward", (rand(3, 4),), {}, 0)
    assert all(p.grad is not None for layer in actor.layers for p in layer.parameters())


class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def no_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.b(x).mean()
        return self.a(x) * scale + self.b(x.detach()).sum()

    def autocast(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(torch.relu(self.a(x)))
        return h.float().softmax(-1)

    def custom(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Scale.apply(self.a(x), 3.0))

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(lambda v: torch.tanh(self.a(v)), x, use_reentrant=False))

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu_()
        out = torch.zeros(3, 8)
        out[0] = h[0]
        out[1:] += self.b(h)[1:]
        return out.mul_(2)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = self.a(x).chunk(2, dim=-1)
        return torch.sigmoid(left) * torch.tanh(right), right.t()

    def constants(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        mask = torch.arange(8) > 3
        return torch.where(mask, self.a(x), weights.exp())

    def inner_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.a(y).pow(2).sum(), y, create_graph=True)
        return g.pow(2).sum() + self.b(x).sum()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.zeros_like(grad)
        out[...] = grad * ctx.by
        out += x * 0
        return out, None


@pytest.mark.parametrize(
    "method",
    [
        "no_grad",
        "autocast",
        "custom",
        "checkpointed",
        "in_place",
        "split",
        "constants",
        "inner_grad",
    ],
)
def test_inside_a_method(method: str) -> None:
    check_equal(Contexts(), method, rand(3, 8))


def test_custom_operators() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
            return twice(self.linear(x)), x.shape

    check_equal(Actor(), "forward", rand(3, 8))


@torch.library.custom_op("cg_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * 2)


def test_dtypes_other_than_float32() -> None:
    check_equal(mlp().double(), "forward", rand(5, 8).detach().double().requires_grad_())
    check_equal(mlp().bfloat16(), "forward", rand(5, 8).detach().bfloat16().requires_grad_())


def test_static_and_keyword_arguments() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, *, power: int, flip: bool = False) -> torch.Tensor:
            y = (x * self.w) ** power
            return y.flip(0) if flip else y

    check_equal(Actor(), "forward", rand(3, 4), power=3, flip=True)


def test_shared_gradients_are_not_shared_memory() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b

    actor = Actor()
    check_equal(actor, "forward", rand(3))
    vjp = trace_vjp(actor, "forward", (0,), (0,), rand(3))
    result = vjp.first.only_body(torch.ones(3))
    cotangent = torch.ones(3)
    (grad,) = vjp.second.only_body(*result[1:], cotangent)
    actor.a.grad.zero_()
    assert actor.b.grad.sum() == 3
    assert cotangent.sum() == 3
    assert grad.sum() == 3


def test_a_result_is_contiguous_and_no_reference_to_state() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0).view(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.table[0], self.table, x.t(), x.t().t()

    actor = Actor()
    x = torch.ones(2, 3)
    traced = trace(actor, "forward", x)
    row, table, turned, _same = traced.body(x)
    actor.table.zero_()
    assert row.tolist() == [0, 1, 2]
    assert table.sum() == 15
    assert turned.is_contiguous()
    assert traced.state_outputs == (0, 1)
    assert traced.declaration.aliases == ((3, 0),)


def test_inputs_of_any_layout() -> None:
    actor = Contexts()
    x = rand(8, 3, grad=False).t()
    traced = trace(Flat(), "forward", x)
    assert torch.equal(traced.body(x)[0], x.reshape(-1))
    del actor


class Flat:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) * 1


def test_gradient_mode_is_that_of_the_step() -> None:
    with torch.no_grad():
        traced = trace(mlp(), "forward", rand(5, 8))
    assert not traced.results.leaves[0].requires_grad  # type: ignore[union-attr]


def test_bodies_do_not_depend_on_the_callers_modes() -> None:
    net = mlp()
    x = rand(5, 8, grad=False)
    body = trace(net, "forward", x).body
    expected = net(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        (ours,) = body(x)
    assert torch.equal(ours, expected)
    assert not ours.requires_grad
