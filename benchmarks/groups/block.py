"""A tensor parallel layer of Llama, against DTensor: a training step, and a step of decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from llama_model import LLAMA, SMALL, Layer, Shape, rotated
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import cg

from .bench import Bench, Run, close

PROMPT, USERS = 1024, 8
"""Tokens that a decoding step looks back at, and sequences that it decodes."""

PLAN = {
    "layer.wq.weight|layer.wk.weight|layer.wv.weight": cg.cut(0, "tp"),
    "layer.gate.weight|layer.up.weight": cg.cut(0, "tp"),
    "layer.wo.weight|layer.down.weight": cg.cut(1, "tp"),
    "keys|values": cg.cut(1, "tp"),
}
DTENSOR = {
    **{name: ColwiseParallel() for name in ("wq", "wk", "wv", "gate", "up")},
    **{name: RowwiseParallel() for name in ("wo", "down")},
}


class Block(nn.Module):
    """A layer with angles of its own. x: [batch, tokens, width]."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(device):
            self.layer = Layer(shape).to(dtype)
            size = shape.width // shape.heads
            rates = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
            angles = torch.arange(shape.sequence).float()[:, None] * rates
            angles = torch.cat((angles, angles), dim=-1)
            self.register_buffer("cos", angles.cos().to(dtype))
            self.register_buffer("sin", angles.sin().to(dtype))
            cache = torch.randn(2, USERS, shape.heads, PROMPT, size).to(dtype)
            self.register_buffer("keys", cache[0].clone())
            self.register_buffer("values", cache[1].clone())

    def loss(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x, self.cos, self.sin)
        return made.float().square().mean()

    def decode(self, x: Tensor) -> Tensor:
        """The next token's features: [batch, 1, width], after the cached ones."""
        layer, batch = self.layer, len(x)
        normed = layer.norm1(x)
        q, k, v = (
            linear(normed).view(batch, 1, layer.heads, -1).transpose(1, 2)
            for linear in (layer.wq, layer.wk, layer.wv)
        )
        cos, sin = self.cos[-1:], self.sin[-1:]
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        mixed = F.scaled_dot_product_attention(
            q, torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2)
        )
        x = x + layer.wo(mixed.transpose(1, 2).flatten(2))
        normed = layer.norm2(x)
        return x + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))


cg.actor(Block)


def block(bench: Bench) -> None:
    """In bfloat16; on hosts, small and in float32."""
    shape = SMALL if bench.is_small else LLAMA
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    tolerance = 0.05 if bench.is_gpu else 1e-4
    ranks, device = cg.world_size(), bench.device
    actor = Block.on(cg.mesh(tp=ranks), plan=PLAN)(shape, device, dtype)  # type: ignore[attr-defined]
    theirs: Any = Block(shape, device, dtype)
    parallelize_module(theirs.layer, init_device_mesh(device.type, (ranks,)), dict(DTENSOR))
    theirs.layer.heads //= ranks  # its views are of what a rank has
    peer = torch.compile(theirs.loss) if bench.compiles else theirs.loss
    generator = torch.Generator().manual_seed(1)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    x = drawn(1, shape.sequence, shape.width)

    @cg.trace
    def train(x: Tensor) -> Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        return loss

    compiled = train.lower(x).compile(fuse=bench.fuse)

    def theirs_train() -> Tensor:
        loss: Tensor = peer(x)
        loss.backward()
        return loss

    close(compiled(x), theirs_train(), tolerance, "the loss of a block")
    mine, right = actor.local.layer.down.weight.grad, theirs.layer.down.weight.grad.to_local()
    close(mine, right, tolerance, "a gradient of a block")
    arms: dict[str, Run] = {"cg": partial(compiled, x), "DTensor": theirs_train}
    what = f"width {shape.width}, {shape.sequence} tokens"
    bench.compare("block", f"{what}, forward and backward", arms, inner=5)
    compiled.close()
    _decoding(bench, shape, actor, theirs, drawn, tolerance)


def _decoding(
    bench: Bench, shape: Shape, actor: Any, theirs: Any, drawn: Any, tolerance: float
) -> None:
    ranks, rank = cg.world_size(), cg.rank()
    x = drawn(USERS, 1, shape.width)
    theirs.keys, theirs.values = (
        each.chunk(ranks, 1)[rank].contiguous() for each in (theirs.keys, theirs.values)
    )
    decode = cg.trace(lambda x: actor.decode(x))
    with torch.no_grad():
        compiled = decode.lower(x).compile(fuse=bench.fuse)
        peer = torch.compile(theirs.decode) if bench.compiles else theirs.decode
        close(compiled(x), peer(x), tolerance, "a decoding step")
        arms: dict[str, Run] = {
            "cg": partial(_without_gradients, compiled, x),
            "DTensor": partial(_without_gradients, peer, x),
            "DTensor eager": partial(_without_gradients, theirs.decode, x),
        }
        bench.compare("block", f"width {shape.width}, decoding {USERS} tokens", arms, inner=20)
        compiled.close()


def _without_gradients(run: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        made: Tensor = run(x)
        return made
