"""Forward and backward of four layers of Llama-7B on one GPU: torch, torch.compile, and cg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from groups.bench import Run, close
from llama_model import LLAMA, SMALL, Part, forget_gradients
from torch import Tensor

import cg

from .bench import GIB, OneGpu, how_captured

LAYERS = 4
BATCH = 8
COMPILE_SECONDS = 40.0
"""That compiling the layers takes at most."""


@cg.actor
class Layers(Part):
    """Layers from the middle of the model, [batch, tokens, width] to the same."""

    def mean(self, x: Tensor) -> Tensor:
        """A loss: the mean of squares of what the layers give."""
        given: Tensor = self.forward(x)
        return given.float().square().mean()


Arm = Callable[[OneGpu, Any, Tensor], tuple[Callable[[Tensor], Any], Callable[[], object]]]
"""Makes a training step of an actor for inputs like this one, and what gives its memory back."""


def stage(bench: OneGpu) -> None:
    """Milliseconds and memory in bfloat16, 8 sequences of 2,048; on hosts small, in float32.

    Each arm is made, measured and given up before the next. Its time is taken in turns with plain
    torch, for clocks change. Its peak is of everything from its making on, captures included, for
    what a graph holds is not counted while it is replayed.
    """
    shape = SMALL if bench.is_small else LLAMA
    batch, dtype = (2, torch.float32) if bench.is_small else (BATCH, torch.bfloat16)
    actor = Layers.on(0)(shape, range(1, 1 + LAYERS), str(bench.device), dtype)  # type: ignore[attr-defined]
    module = actor.local
    x = torch.randn(batch, shape.sequence, shape.width, device=bench.device, dtype=dtype)
    right = _gradients(module, _eager(bench, actor, x)[0], x)
    flops = batch * LAYERS * (
        6 * (4 * shape.width**2 + 3 * shape.width * shape.hidden) * shape.sequence
        + 6 * shape.sequence**2 * shape.width
    )  # fmt: skip
    own = sum(p.numel() * p.element_size() for p in module.parameters()) / GIB
    bench.report.note("stage", "parameters, as many gradients come to it", own, "GiB")
    for name, (make, compiles) in ARMS.items():
        seconds = bench.compile_seconds(COMPILE_SECONDS) if compiles else 15.0 * bench.is_gpu
        if bench.wants(name, seconds) and (bench.compiles or not compiles or name.startswith("cg")):
            _measure(bench, name, make, actor, x, right, flops)
            bench.free()


def _measure(
    bench: OneGpu, name: str, make: Arm, actor: Any, x: Tensor, right: list[Tensor], flops: int
) -> None:
    module = actor.local
    forget_gradients([module])
    bench.free()
    with bench.timed(name):
        run, release = make(bench, actor, x)
        for _ in range(6):
            forget_gradients([module])
            run(x)
    bench.report.note("stage", f"{name}, peak of tensors", bench.peak(), "GiB")
    bench.report.note("stage", f"{name}, taken from the GPU", bench.reserved(), "GiB")
    for mine, other in zip(_gradients(module, run, x), right, strict=True):
        close(mine, other, 0.05 if bench.is_gpu else 1e-3, f"a gradient, {name}")
    plain = _eager(bench, actor, x)[0]
    arms: dict[str, Run] = {"torch": lambda: plain(x), name: lambda: run(x)}
    found = bench.turns(arms, 1, warm=2, before=lambda: forget_gradients([module]))
    teraflops = flops / found[name] / 1e9
    bench.report.note("stage", name, found[name], "ms", teraflops=round(teraflops, 1))
    bench.report.note("stage", f"{name} / torch in its turns", found[name] / found["torch"], "x")
    release()
    forget_gradients([module])


def _gradients(module: Any, run: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Those of the first layer's queries and the last layer's MLP."""
    forget_gradients([module])
    run(x)
    first, *_, last = module.layers.values()
    found = [first.wq.weight.grad.clone(), last.down.weight.grad.clone()]
    forget_gradients([module])
    return found


# -- arms ---------------------------------------------------------------------------------------


def _eager(bench: OneGpu, actor: Any, x: Tensor) -> tuple[Callable[[Tensor], Any], Any]:
    return _of_torch(actor.local.mean), lambda: None


def _compiled(bench: OneGpu, actor: Any, x: Tensor) -> tuple[Callable[[Tensor], Any], Any]:
    return _of_torch(torch.compile(actor.local.mean, dynamic=False)), torch._dynamo.reset


def _reduced(bench: OneGpu, actor: Any, x: Tensor) -> tuple[Callable[[Tensor], Any], Any]:
    loss = torch.compile(actor.local.mean, dynamic=False, mode="reduce-overhead")
    return _of_torch(loss, torch.compiler.cudagraph_mark_step_begin), torch._dynamo.reset


def _of_torch(loss: Any, begin: Callable[[], object] = lambda: None) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Tensor:
        begin()
        value: Tensor = loss(x)
        value.backward()
        return value

    return run


def _cg(bench: OneGpu, actor: Any, x: Tensor) -> tuple[Callable[[Tensor], Any], Any]:
    return _of_cg(bench, actor, x, None)


def _cg_fused(bench: OneGpu, actor: Any, x: Tensor) -> tuple[Callable[[Tensor], Any], Any]:
    return _of_cg(bench, actor, x, bench.fuse)


def _of_cg(
    bench: OneGpu, actor: Any, x: Tensor, fuse: str | None
) -> tuple[Callable[[Tensor], Any], Any]:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = actor.mean(x)
        cg.backward(loss)
        return loss

    compiled = step.lower(x).compile(fuse=fuse)

    def release() -> None:
        bench.report.say("    cg:", how_captured(compiled))
        bench.report.say("    not fused:", {k: v for k, v in compiled.fused.items() if v})
        compiled.close()

    return compiled, release


ARMS: dict[str, tuple[Arm, bool]] = {
    "torch": (_eager, False),
    "cg": (_cg, False),
    "torch.compile": (_compiled, True),
    "cg fused": (_cg_fused, True),
    "torch.compile, reduce-overhead": (_reduced, True),
}
"""By name: what makes it, and whether TorchInductor compiles it."""
