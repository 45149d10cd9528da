"""Blocks of random models that do what programs do: views, checkpoints, hooks, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cg

from .block import ACTIVATIONS, LENGTH, WIDTH, Block, Digits, widened


class Positions(Block):
    """A learned table, indexed by integers in several ways."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(5)
        self.table = nn.Embedding(LENGTH + 1, WIDTH, padding_idx=(None, 0)[digits.take(2)])
        self.register_buffer("order", torch.arange(LENGTH).flip(0), persistent=False)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.kind == 0:
            return h + self.table(torch.arange(LENGTH, device=h.device))  # type: ignore[no-any-return]
        if self.kind == 1:
            return h + self.table.weight[self.order]
        if self.kind == 2:
            return h + self.table(mask.long().cumsum(-1))  # type: ignore[no-any-return]
        if self.kind == 3:
            index = h.detach().argsort(1)
            return h.gather(1, index) + self.table.weight[:LENGTH]
        counts = mask.long() * (1 + self.order)
        bag = functional.embedding_bag(counts, self.table.weight, mode="sum")
        return h + bag[:, None]


class Checkpointed(Block):
    """A part that is computed again in the backward."""

    cuts: ClassVar = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.activation = ACTIVATIONS[digits.take(8)]
        self.nested = digits.take(2)

    def inner(self, h: Tensor) -> Tensor:
        return self.down(self.activation(self.up(self.norm(h))))  # type: ignore[no-any-return]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        out = checkpoint(self.inner, h, use_reentrant=False)
        if self.nested:
            return checkpoint(
                lambda x: x + checkpoint(self.inner, x, use_reentrant=False),
                out,
                use_reentrant=False,
            )  # type: ignore[no-any-return]
        return h + out  # type: ignore[no-any-return]


class Twice(Block):
    """A weight that is used twice, also transposed and as a part."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(4)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.alias = self.inner if digits.take(2) else nn.Identity()

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(h))
        if self.kind == 0:
            return self.inner(hidden)  # type: ignore[no-any-return]
        if self.kind == 1:
            return hidden @ self.inner.weight.T
        if self.kind == 2:
            return self.alias(hidden) + self.inner.weight[0] + self.inner.weight[:, 1]
        return hidden + functional.linear(h, self.inner.weight.t(), self.inner.bias)


class Frozen(Block):
    """Parameters that are not trained, beside others that are."""

    cuts: ClassVar = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        kind = digits.take(4)
        self.up.requires_grad_(kind in (1, 3))
        self.down.requires_grad_(kind in (2, 3))
        self.down.bias.requires_grad_(kind == 0)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))  # type: ignore[no-any-return]


class Unused(Block):
    """Parameters that no loss needs, and those that it needs in vain."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(6)
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        other = self.other(h)
        if self.kind == 1:  # zeros, and not nothing
            return self.inner(h) + 0 * other  # type: ignore[no-any-return]
        if self.kind == 2:
            return self.inner(h) + other.detach()  # type: ignore[no-any-return]
        if self.kind == 3:
            with torch.no_grad():
                scale = self.other(h).abs().mean() + 1
            return self.inner(h) / scale  # type: ignore[no-any-return]
        if self.kind == 4:
            return self.inner(h) + (other > 0).to(h.dtype)  # type: ignore[no-any-return]
        if self.kind == 5:
            return self.inner(h) + torch.zeros_like(other) + other.round()  # type: ignore[no-any-return]
        return self.inner(h)  # type: ignore[no-any-return]


class Views(Block):
    """Views of values, and writes in place into copies."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(12)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        x = h * self.gain
        operations: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
            self.write_slices,
            self.write_under_mask,
            self.chunks,
            self.scatter,
            self.roll,
            self.unfold,
            self.write_through_view,
            self.expand,
            self.index_add,
            self.sorted,
            self.strides,
            self.activate_in_place,
        )
        return operations[self.kind](x, mask)

    def write_slices(self, x: Tensor, mask: Tensor) -> Tensor:
        x[:, 0] += x[:, 1]
        x[..., ::2] *= 0.5
        return x

    def write_under_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        x.masked_fill_(~mask[..., None], 0.25)
        return torch.where(mask[..., None], x, x.detach() * 2)

    def chunks(self, x: Tensor, mask: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        third, *rest = second.split((1, 3), -1)
        return torch.cat([rest[0], first.neg(), third], -1)

    def scatter(self, x: Tensor, mask: Tensor) -> Tensor:
        index = x.detach().argmax(-1, keepdim=True)
        return torch.zeros_like(x).scatter(-1, index, x.amax(-1, keepdim=True)) + 0.1 * x

    def roll(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.roll(1, 1).flip(-1) + functional.pad(x[:, 1:], (0, 0, 1, 0))

    def unfold(self, x: Tensor, mask: Tensor) -> Tensor:
        windows = functional.pad(x, (1, 1)).unfold(-1, 3, 1)
        return windows.mean(-1)

    def write_through_view(self, x: Tensor, mask: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        flat[:, :2].add_(1.0)
        x.transpose(1, 2).select(1, 3).mul_(-0.5)
        return x

    def expand(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).expand_as(x)
        return x - mean + mean.contiguous().tanh()

    def index_add(self, x: Tensor, mask: Tensor) -> Tensor:
        index = torch.tensor([0, 2, 2, 1], device=x.device)
        return x.index_add(1, index, x.sin()).index_select(1, index)

    def sorted(self, x: Tensor, mask: Tensor) -> Tensor:
        values, index = x.sort(-1)
        top, _ = x.topk(2, -1)
        return values.cumsum(-1) * 0.2 + top.sum(-1, keepdim=True) + index.to(x.dtype) * 0.1

    def strides(self, x: Tensor, mask: Tensor) -> Tensor:
        square = x.reshape(-1, 2, LENGTH // 2, WIDTH).permute(3, 0, 2, 1)
        return square.contiguous().permute(1, 3, 2, 0).reshape(x.shape)

    def activate_in_place(self, x: Tensor, mask: Tensor) -> Tensor:
        functional.relu(x[:, :2], inplace=True)
        return functional.leaky_relu_(x.clone(), 0.1) + nn.functional.dropout(x, 0.0)


class Wrapped(Block):
    """Parametrizations, and layers of other kinds."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        kind = digits.take(5)
        linear = nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module = (
            nn.utils.parametrizations.weight_norm(linear),
            nn.utils.parametrizations.spectral_norm(linear),
            nn.PReLU(WIDTH if digits.take(2) else 1),
            nn.Sequential(linear, nn.Dropout(0.5).eval(), nn.Softmax(-1)),
            nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Flatten(-2), nn.Hardswish(), linear),
        )[kind]
        self.channels = kind == 2

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.channels:
            return self.inner(h.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        return self.inner(h)  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """A gradient that is not that of the function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.scale + 0 * x, None


class Odd(Block):
    """Autograd functions, spectra, einsum, norms and low ranks."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(7)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.randn(2, WIDTH) * 0.3)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.kind == 0:
            return Scaled.apply(self.inner(h), 0.5) + self.extra[0]  # type: ignore[no-any-return,no-untyped-call]
        if self.kind == 1:
            return torch.where(mask[..., None], self.inner(h), self.extra[:1] * h)
        if self.kind == 2:
            spectrum = torch.fft.rfft(widened(self.inner(h)), dim=1)
            return torch.fft.irfft(spectrum * 0.5, n=LENGTH, dim=1).to(h.dtype)
        if self.kind == 3:
            return torch.einsum("blw,rw,rv->blv", self.inner(h), self.extra, self.extra)
        if self.kind == 4:
            update = self.extra.T @ self.extra
            return functional.linear(h, self.inner.weight + update, self.inner.bias)
        if self.kind == 5:
            norm = torch.linalg.vector_norm(self.inner(h), dim=-1, keepdim=True)
            return functional.normalize(h, dim=-1) + torch.logsumexp(norm * h, -1, keepdim=True)
        product = torch.baddbmm(h, h @ h.mT, h.sin(), beta=0.5, alpha=0.1)
        return torch.addcmul(product, h, self.extra[0], value=0.3) + torch.outer(*self.extra).mean()


class Autocast(Block):
    """A region of autocast, which leaves the digits of bfloat16."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(2)
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(h.device.type, dtype=torch.bfloat16):
            out = torch.relu(self.inner(h))
            if self.kind:
                out = functional.layer_norm(self.other(out).float(), (WIDTH,))
        return h + out.to(h.dtype)


class Functional(Block):
    """Transforms of functions, hooks, containers, complex numbers, routing and rounding."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(12)
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ParameterList([torch.randn(WIDTH) * 0.3 for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.ones(2, 4), "b": torch.zeros(())})
        self.register_buffer("nothing", None)
        if self.kind == 1:
            self.inner.register_forward_hook(_double)
            self.other.register_forward_pre_hook(_halve)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        x = self.inner(h)
        if self.kind == 0:
            return torch.func.vmap(lambda row: torch.tanh(row @ self.other.weight))(x)  # type: ignore[no-any-return]
        if self.kind == 1:
            return self.other(x)  # type: ignore[no-any-return]
        if self.kind == 2:
            halved = {name: parameter * 0.5 for name, parameter in self.other.named_parameters()}
            return torch.func.functional_call(self.other, halved, (x,))  # type: ignore[no-any-return]
        if self.kind == 3:
            return x * self.extra[0] + sum(self.extra) + self.named["b"]  # type: ignore[no-any-return]
        if self.kind == 4:
            numbers = torch.view_as_complex(widened(x).unflatten(-1, (-1, 2)).contiguous())
            rotated = numbers * torch.polar(torch.ones_like(numbers.real), numbers.real.detach())
            return torch.view_as_real(rotated).flatten(-2).to(h.dtype)
        if self.kind == 5:  # of a mixture of experts, all of which are computed
            gates, chosen = self.other(h).topk(2, -1)
            weights = torch.zeros_like(x).scatter(-1, chosen, gates.softmax(-1))
            return torch.einsum("blw,blw,w->blw", weights, x, self.extra[0]) + h
        if self.kind == 6:  # a gradient that passes straight through
            return x + (torch.round(x * 4) / 4 - x).detach() + self.named["a"].flatten()
        if self.kind == 7:
            empty = x[:, :0]
            return torch.cat([empty, x, empty], 1) + empty.sum()
        if self.kind == 8:
            steps = torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype))
            return x + functional.one_hot(steps, 4).to(x.dtype).mean(-1) + x.cummax(-1)[0]
        if self.kind == 9:
            return torch.where(x > 0, x, self.extra[1]) + x.clamp(max=self.extra[0].max())
        if self.kind == 10:
            first, second = torch.broadcast_tensors(x, self.extra[0])
            return torch.stack([first, second], 0).prod(0) + torch.lerp(x, h, 0.3)
        counts = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype, device=x.device)
        counts.index_put_((torch.arange(x.shape[0]), mask.sum(-1)), x[:, 0, 0], accumulate=True)
        return x + counts[:, None]


def _double(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


def _halve(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] * 0.5,)
