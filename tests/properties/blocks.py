"""Building blocks of random models: each takes hidden values [rows, LENGTH, WIDTH] to others.

A block is drawn as its name and a variant, a number whose digits choose its options. It knows which
of its parameters a plan cuts as tensor parallelism does; a block that does not is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cg
from cg.tracer.values.plan import Sharding

WIDTH, HEADS, LENGTH, VOCABULARY = 8, 4, 4, 12

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.relu,
    functional.gelu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.silu,
    functional.elu,
    functional.selu,
    functional.celu,
    functional.leaky_relu,
    functional.softplus,
    functional.softsign,
    functional.mish,
    functional.hardswish,
    functional.hardsigmoid,
    functional.hardtanh,
    functional.relu6,
    functional.logsigmoid,
    functional.tanhshrink,
    functional.softshrink,
    functional.hardshrink,
    torch.tanh,
    torch.sigmoid,
    lambda x: functional.glu(torch.cat([x, x.sin()], -1)),
    lambda x: torch.square(functional.relu(x)),
    lambda x: functional.threshold(x, 0.1, 0.2),
)


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


class Digits:
    """The options of a block, taken one after the other from a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self, count: int) -> int:
        self.number, digit = divmod(self.number, count)
        return digit


BLOCKS: dict[str, type[Block]] = {}


class Block(nn.Module):
    """A block; `mask` is bool [rows, LENGTH], True in at least the first place of each row.

    Attributes:
        cuts: what tensor parallelism cuts, by the names of parameters.
    """

    cuts: ClassVar[Mapping[str, Sharding]] = {}

    def __init_subclass__(cls) -> None:
        BLOCKS[cls.__name__] = cls

    def __init__(self, digits: Digits) -> None:
        super().__init__()

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


class Mlp(Block):
    cuts: ClassVar = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.activation = ACTIVATIONS[digits.take(len(ACTIVATIONS))]
        self.residual = digits.take(2)
        self.up = nn.Linear(WIDTH, 12, bias=digits.take(3) > 0)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        out = self.down(self.activation(self.up(h)))
        return h + out if self.residual else out


class Gated(Block):
    cuts: ClassVar = {"gate.*|up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.activation = ACTIVATIONS[digits.take(6)]
        self.gate, self.up = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + self.down(self.activation(self.gate(h)) * self.up(h))


class Attention(Block):
    """scaled_dot_product_attention: causal or masked in several ways, of all or grouped heads."""

    cuts: ClassVar = {"[qkv].*": cg.cut(0, "tp"), "o.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(6)
        self.kv_heads = (HEADS, 2)[digits.take(2)]
        size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=digits.take(2) > 0)
        self.k, self.v = (nn.Linear(WIDTH, size * self.kv_heads) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=digits.take(2) > 0)
        self.register_buffer("slope", torch.linspace(-1, 0, LENGTH))
        self.scale = (None, 0.5)[digits.take(2)]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = h.shape
        q, k, v = (
            layer(h).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._bias(h, mask),
            is_causal=self.kind == 1,
            enable_gqa=self.kv_heads != HEADS,
            scale=self.scale,
        )
        return h + self.o(out.transpose(1, 2).reshape(rows, length, -1))

    def _bias(self, h: Tensor, mask: Tensor) -> Tensor | None:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=h.device).tril()
        if self.kind == 2:
            return causal
        if self.kind == 3:
            return mask[:, None, None, :]
        if self.kind == 4:
            return causal & mask[:, None, None, :]
        if self.kind == 5:
            zeros = torch.zeros(LENGTH, LENGTH, dtype=h.dtype, device=h.device)
            return zeros.masked_fill(~causal, float("-inf")) + self.slope
        return None


class Written(Block):
    """Attention that is written out, with a packed projection."""

    cuts: ClassVar = {"qkv.*": cg.cut(0, "tp", blocks=3), "o.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = digits.take(3)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = h.shape
        q, k, v = (
            part.view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(h).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / 2
        if self.kind == 1:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(h.dtype).min)
        if self.kind == 2:
            scores = torch.einsum("bhqd,bhkd->bhqk", widened(q), widened(k))
        out = scores.softmax(-1).to(h.dtype) @ v
        return h + self.o(out.transpose(1, 2).flatten(2))


class Multihead(Block):
    cuts: ClassVar = {
        "inner.in_proj_*": cg.cut(0, "tp", blocks=3),
        "inner.out_proj.weight": cg.cut(1, "tp"),
    }

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.is_padded, self.is_causal = digits.take(2), digits.take(2)
        self.weights_form = digits.take(3)
        has_bias = digits.take(2) > 0
        has_zero, has_kv_bias = digits.take(4) == 3, digits.take(4) == 3
        self.batch_first = digits.take(2) > 0
        self.inner = nn.MultiheadAttention(
            WIDTH,
            HEADS,
            bias=has_bias,
            add_bias_kv=has_kv_bias,
            add_zero_attn=has_zero,
            batch_first=self.batch_first,
        )

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=h.device).triu(1)
        x = h if self.batch_first else h.transpose(0, 1)
        out, weights = self.inner(
            x,
            x,
            x,
            key_padding_mask=~mask if self.is_padded else None,
            attn_mask=causal if self.is_causal else None,
            need_weights=self.weights_form > 0,
            average_attn_weights=self.weights_form == 1,
        )
        if self.weights_form == 2:
            out = out + weights.mean()
        return h + (out if self.batch_first else out.transpose(0, 1))


class Encoder(Block):
    cuts: ClassVar = {
        "inner.self_attn.in_proj_*": cg.cut(0, "tp", blocks=3),
        "inner.self_attn.out_proj.weight": cg.cut(1, "tp"),
        "inner.linear1.*": cg.cut(0, "tp"),
        "inner.linear2.weight": cg.cut(1, "tp"),
    }

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.inner = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            12,
            dropout=0.0,
            activation=("relu", "gelu")[digits.take(2)],
            norm_first=digits.take(2) > 0,
            batch_first=True,
        )
        self.kind = digits.take(3)
        if digits.take(3) == 2:
            self.inner.eval()

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        causal = None
        if self.kind == 1:
            causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=h.dtype)
        padding = ~mask if self.kind == 2 else None
        return self.inner(h, src_mask=causal, src_key_padding_mask=padding, is_causal=False)  # type: ignore[no-any-return]


class Decoder(Block):
    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.inner = nn.TransformerDecoderLayer(
            WIDTH, 2, 12, dropout=0.0, norm_first=digits.take(2) > 0, batch_first=True
        )

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.inner(h, h.flip(1), memory_key_padding_mask=~mask.flip(1))  # type: ignore[no-any-return]


class Norm(Block):
    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        affine = digits.take(3) > 0
        self.transposed = digits.take(2)
        self.inner: nn.Module = (
            nn.LayerNorm(WIDTH, elementwise_affine=affine),
            nn.RMSNorm(WIDTH, elementwise_affine=affine),
            nn.LayerNorm((LENGTH, WIDTH), elementwise_affine=affine),
            nn.LayerNorm(WIDTH, bias=False),
        )[digits.take(4)]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.inner(h) + (h if self.transposed else 0)  # type: ignore[no-any-return]


class Channels(Block):
    """Norms of channels that keep no statistics."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        affine = digits.take(3) > 0
        self.inner: nn.Module = (
            nn.GroupNorm(2, WIDTH, affine=affine),
            nn.GroupNorm(WIDTH, WIDTH, affine=affine),
            nn.InstanceNorm1d(WIDTH, affine=affine),
            nn.BatchNorm1d(WIDTH, affine=affine, track_running_stats=False),
            nn.LocalResponseNorm(2),
        )[digits.take(5)]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.inner(h.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Running(Block):
    """Norms that keep statistics, in training or evaluation."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(4)
        affine, momentum = digits.take(3) > 0, (0.1, 0.5)[digits.take(2)]
        self.inner = (
            nn.BatchNorm1d(WIDTH, affine=affine, momentum=momentum),
            nn.BatchNorm1d(WIDTH, affine=affine, momentum=momentum),
            nn.BatchNorm2d(WIDTH, affine=affine, momentum=momentum),
            nn.InstanceNorm1d(WIDTH, affine=affine, track_running_stats=True),
        )[self.kind]
        if digits.take(3) == 2:
            self.inner.eval()

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.kind == 0:
            return self.inner(h.flatten(0, 1)).view_as(h)  # type: ignore[no-any-return]
        x = h.transpose(1, 2)
        if self.kind == 2:
            return self.inner(x[..., None]).squeeze(-1).transpose(1, 2)  # type: ignore[no-any-return]
        return self.inner(x).transpose(1, 2)  # type: ignore[no-any-return]


class Counted(Block):
    """Buffers that are written: a counter, and a mean that is kept in place or assigned."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind = digits.take(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("spare", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            new = h.detach().mean((0, 1))
            if self.kind == 0:
                self.count += 1
                self.mean.lerp_(new, 0.25)
            elif self.kind == 1:
                self.mean = 0.75 * self.mean + 0.25 * new
            elif self.kind == 2:
                self.spare[1].copy_(new)
                self.spare[0].add_(self.spare[1], alpha=0.5)
                self.count.add_(mask.sum())
            else:
                self.mean.mul_(0.5).add_(new)
                return h * 0.5 + self.mean.clone()
        return h - self.mean.clone() - self.spare[0].clone()


class Convolution(Block):
    cuts: ClassVar = {"first.*": cg.cut(0, "tp"), "second.weight": cg.cut(1, "tp")}

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        kind, mode = digits.take(3), ("zeros", "circular", "reflect", "replicate")[digits.take(4)]
        size = (1, 3)[digits.take(2)]
        pad = {"kernel_size": size, "padding": size // 2, "padding_mode": mode}
        self.first = nn.Conv1d(WIDTH, 12, **pad) if kind else nn.Conv1d(WIDTH, 12, 1)
        self.second = nn.Conv1d(12, WIDTH, 1, bias=digits.take(2) > 0)
        self.activation = ACTIVATIONS[digits.take(8)]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + self.second(self.activation(self.first(h.transpose(1, 2)))).transpose(1, 2)  # type: ignore[no-any-return]


class Images(Block):
    """Convolutions and pooling of images of LENGTH x WIDTH."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.first = nn.Conv2d(1, 4, 3, padding=1, stride=(1, 2)[digits.take(2)])
        self.second = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=(1, 2, 4)[digits.take(3)])
        self.last = nn.ConvTranspose2d(4, 1, 1)
        self.pool: nn.Module = (
            nn.AdaptiveAvgPool2d((LENGTH, WIDTH)),
            nn.Upsample((LENGTH, WIDTH), mode="nearest"),
            nn.Upsample((LENGTH, WIDTH), mode="bilinear", align_corners=False),
            nn.Sequential(nn.MaxPool2d(2, 1, 1), nn.AdaptiveMaxPool2d((LENGTH, WIDTH))),
            nn.Sequential(nn.AvgPool2d(2, 1), nn.Upsample((LENGTH, WIDTH), mode="bicubic")),
        )[digits.take(5)]

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        x = functional.silu(self.first(h.unsqueeze(1)))
        return self.pool(self.last(self.second(x))).squeeze(1)  # type: ignore[no-any-return]


class Recurrent(Block):
    """Recurrent layers, whose last states are used or not."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.kind, self.is_bidirectional = digits.take(3), digits.take(2) > 0
        layer_count = 1 + digits.take(2)
        size = WIDTH // 2 if self.is_bidirectional else WIDTH
        cls: Any = (nn.LSTM, nn.GRU, nn.RNN)[self.kind]
        self.inner = cls(
            WIDTH, size, layer_count, batch_first=True, bidirectional=self.is_bidirectional
        )
        self.uses_state = digits.take(2)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        out, state = self.inner(h)
        if self.uses_state:
            hidden = state[0] if self.kind == 0 else state
            return out + hidden.mean((0, 2))[:, None, None]  # type: ignore[no-any-return]
        return out  # type: ignore[no-any-return]


class Cell(Block):
    """A recurrent cell in a Python loop."""

    def __init__(self, digits: Digits) -> None:
        super().__init__(digits)
        self.inner = nn.GRUCell(WIDTH, WIDTH) if digits.take(2) else nn.RNNCell(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        state, states = torch.zeros_like(h[:, 0]), []
        for x in h.unbind(1):
            state = self.inner(x, state)
            states.append(state)
        return torch.stack(states, 1)


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
