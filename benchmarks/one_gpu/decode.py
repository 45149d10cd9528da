"""A decode step of Qwen2.5-0.5B's shapes: transformers, CUDA graphs by hand, cg, and the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from groups.bench import Run
from torch import Tensor

import cg
from examples.serve.engine import CgEngine, start
from examples.serve.settings import Options
from examples.serve.work import POSITION, SLOT, TABLE, TOKEN, Decode

from .bench import ByHand, OneGpu, how_captured
from .qwen2 import REAL, SMALL, Decoder, Sizes

COMPILE_SECONDS = 75.0
"""That compiling two arms of one batch size takes at most."""

AGREE = 0.9
"""The share of rows whose first token must be the model's: in float16, with random weights, two
logits may be equal but for the order of a sum, which depends on the kernels that are chosen."""


def agreement(found: list[list[int]], right: list[list[int]]) -> float:
    """The share of rows whose first tokens are equal; later ones follow from these."""
    pairs = list(zip(found[0], right[0], strict=True))
    return sum(one == two for one, two in pairs) / len(pairs)


class Fed:
    """Steps of which each takes what the one before has given."""

    def __init__(self, step: Any, ids: Tensor) -> None:
        self._step, self._ids = step, ids

    def __call__(self) -> None:
        self._ids = self._step(self._ids)


@dataclass
class Subject:
    """A model of one batch size, which all arms share, with its cache."""

    sizes: Sizes
    batch: int
    actor: Any
    ids: Tensor

    @staticmethod
    def make(bench: OneGpu, sizes: Sizes, batch: int, dtype: torch.dtype) -> Subject:
        actor = Decoder.on(0)(sizes, batch, str(bench.device), dtype)  # type: ignore[attr-defined]
        ids = torch.arange(batch, device=bench.device)[:, None] + 1
        return Subject(sizes, batch, actor, ids)

    @property
    def module(self) -> Any:
        return self.actor.local

    def name(self, arm: str) -> str:
        return f"B = {self.batch:2}, {arm}"

    def tokens(self, step: Any) -> list[list[int]]:
        """The results of some steps from the beginning; more than warm-ups take."""
        self.module.rewind()
        found, ids = [], self.ids
        for _ in range(8):
            ids = step(ids).clone()
            found.append(ids.flatten().tolist())
        return found


def decode(bench: OneGpu) -> None:
    """Milliseconds of a step in float16, on hosts small and in float32."""
    sizes = SMALL if bench.is_small else REAL
    dtype = torch.float16 if bench.is_gpu else torch.float32
    with torch.no_grad():
        subjects = [Subject.make(bench, sizes, batch, dtype) for batch in sizes.batches]
        module = subjects[0].module
        bench.report.note("decode", "weights", module.weight_bytes / 2**20, "MiB")
        for subject in subjects:
            if bench.wants(subject.name("as they are"), 15.0 if bench.is_gpu else 0.0):
                _as_they_are(bench, subject)
        if bench.wants("the engine", 30.0 if bench.is_gpu else 0.0):
            _engine(bench, sizes, dtype, sizes.batches, None)
        order = sorted(subjects, key=lambda subject: abs(subject.batch - 8))
        for subject in order if bench.compiles or bench.is_small else ():
            what = subject.name("compiled")
            if bench.wants(what, bench.compile_seconds(COMPILE_SECONDS)):
                _compiled(bench, subject)
        if bench.wants("the fused engine", bench.compile_seconds(COMPILE_SECONDS)):
            _engine(bench, sizes, dtype, sizes.batches[1:2], bench.fuse)
        del subjects, order, subject
    bench.free()


def _as_they_are(bench: OneGpu, subject: Subject) -> None:
    """Eager, captured by hand, and as a step and a driven graph of cg; kernels are torch's own."""
    actor, module, ids = subject.actor, subject.module, subject.ids
    right = subject.tokens(module.step)
    by_hand = ByHand(module.step, ids)
    compiled = cg.trace(lambda ids: actor.step(ids)).lower(ids).compile()
    driven = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(lambda ids: actor.step(ids))
    graph = driven.lower(ids).compile(max_inflight=2)

    def execute(ids: Tensor) -> Tensor:
        result: Tensor = graph.execute(ids).result()
        return result

    for name, step in (("by hand", by_hand), ("cg step", compiled), ("cg driven", execute)):
        share = agreement(subject.tokens(step), right)
        assert share >= AGREE, f"{name}: {share:.0%} of the first tokens are those of the model"
    name = subject.name
    arms: dict[str, Run] = {
        name("transformers eager"): Fed(module.step, ids),
        name("by hand, one graph"): Fed(by_hand, ids),
        name("cg step"): Fed(compiled, ids),
        name("cg driven"): Fed(execute, ids),
    }
    found = bench.turns_ms("decode", arms, subject.sizes.inner, module.rewind)
    for arm in ("cg step", "cg driven"):
        ratio = found[name(arm)] / found[name("by hand, one graph")]
        bench.report.note("decode", name(f"{arm} / by hand"), ratio, "x")
    bench.report.say("   ", "cg step:", how_captured(compiled))
    bench.report.say("   ", "cg driven:", how_captured(graph))
    compiled.close()
    graph.close()


def _compiled(bench: OneGpu, subject: Subject) -> None:
    """By TorchInductor on both sides, captured; in a trial on hosts nothing is compiled."""
    actor, module, ids, name = subject.actor, subject.module, subject.ids, subject.name
    with bench.timed(name("torch.compile, by hand")):
        step = torch.compile(module.step, dynamic=False) if bench.compiles else module.step
        module.rewind()
        by_hand = ByHand(step, ids)
    with bench.timed(name("cg, fused")):
        fused = cg.trace(lambda ids: actor.step(ids)).lower(ids).compile(fuse=bench.fuse)
    right, mine = subject.tokens(by_hand), subject.tokens(fused)
    first = sum(a == b for a, b in zip(mine[0], right[0], strict=True)) / subject.batch
    bench.report.note("decode", name("first tokens of both that are equal"), first, "")
    arms: dict[str, Run] = {
        name("torch.compile, by hand, one graph"): Fed(by_hand, ids),
        name("cg step, fused"): Fed(fused, ids),
    }
    found = bench.turns_ms("decode", arms, subject.sizes.inner, module.rewind)
    theirs, ours = found.values()
    bench.report.note("decode", name("cg step, fused / torch.compile by hand"), ours / theirs, "x")
    bench.report.say("   ", "cg:", how_captured(fused), {k: v for k, v in fused.fused.items() if v})
    fused.close()


# -- the engine ---------------------------------------------------------------------------------


def _engine(
    bench: OneGpu, sizes: Sizes, dtype: torch.dtype, batches: tuple[int, ...], fuse: str | None
) -> None:
    """The engine of examples/serve, with a paged cache, and its tokens known on the host."""
    table = sizes.context // 16
    options = Options(
        groups=1,
        batches=batches,
        chunks=(16,),
        blocks=1 + table * batches[-1],
        context=sizes.context,
        widths=(),
        dtype=dtype,
        fuse=fuse,
        draws=False,
    )
    name = "engine, paged" if fuse is None else "engine, paged, fused"
    with bench.timed(name):
        engine = start(sizes.config(), options)
    assert engine is not None, "there is one rank"
    arms: dict[str, Run] = {}
    for batch in batches:
        arms[f"B = {batch:2}, {name}, a step"] = Steps(engine, sizes, batch)
    for name, milliseconds in bench.turns(arms, 1).items():
        bench.report.note("decode", name, milliseconds / sizes.inner, "ms")
    engine.close()
    del engine, arms
    bench.free()


class Steps:
    """Decode steps of which the second is submitted before the tokens of the first are known."""

    def __init__(self, engine: CgEngine, sizes: Sizes, batch: int) -> None:
        self._engine, self._steps = engine, sizes.inner
        table = np.arange(1, 1 + batch * (sizes.context // 16)).reshape(batch, -1)
        self._rows = np.zeros((batch, TABLE + table.shape[1]), np.int64)
        self._rows[:, SLOT], self._rows[:, TABLE:] = np.arange(batch), table
        self._filled = sizes.filled
        assert sizes.filled + sizes.inner <= sizes.context

    def __call__(self) -> None:
        under_way: deque[Any] = deque()
        for step in range(self._steps):
            self._rows[:, TOKEN] = -1 if step else 1
            self._rows[:, POSITION] = self._filled + step
            under_way.append(self._engine.submit(Decode(0, self._rows)))
            if len(under_way) == 2:
                under_way.popleft().result()
        while under_way:
            under_way.popleft().result()
