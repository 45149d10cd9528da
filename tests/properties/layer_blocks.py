"""Blocks of random models that are layers of torch.nn, and layers as models write them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import cg

from .block import ACTIVATIONS, HEADS, LENGTH, WIDTH, Block, Digits, widened


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
