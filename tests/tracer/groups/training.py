"""Models on meshes, and the same models in one process, trained side by side.

Stages of a model are actors on meshes. `train` runs steps of them and of plain instances, which
are made of the same numbers, and gives what both have computed: `assert_equal` compares outputs,
gradients as the update finds them, and parameters after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import cg
from cg.ir.layout import Region
from cg.ir.types import Mesh
from cg.tracer.values.gradient_buckets import BUCKET
from cg.tracer.values.pieces import piece
from cg.tracer.values.plan import Sharding

WIDTH, HEADS, VOCABULARY, LENGTH = 8, 4, 10, 3


class RecordingStage(nn.Module):
    """A part of a model; keeps the gradients that its last update has found.

    Attributes:
        found: them, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def finish(self, optimizer: str, is_integer: bool) -> None:
        """End the constructor: all numbers are small integers if wanted so."""
        if is_integer:
            self.double()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.randint(-1, 2, parameter.shape))
        makers: dict[str, Callable[..., Any]] = {
            "signs": Signs,
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
        }
        self.optimizer = makers[optimizer](list(self.parameters()))

    def update(self) -> None:
        self.found = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return (h * y).sum() if h.dtype == torch.float64 else ((h - y) ** 2).mean()


class Signs:
    """An optimizer that keeps integers small: each goes down by the sign of its gradient."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@cg.actor
class Mlp(RecordingStage):
    """Integers, of which a layer makes integers."""

    def __init__(self, seed: int, optimizer: str = "signs", width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.finish(optimizer, optimizer == "signs")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@cg.actor
class Residual(RecordingStage):
    """A layer whose outputs are cut beside a sum with what it takes, which is not."""

    def __init__(self, seed: int, optimizer: str = "signs") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.finish(optimizer, optimizer == "signs")

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Pair(nn.Module):
    """Two layers without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@cg.actor
class Tower(RecordingStage):
    """Several pairs of layers in a list; stored in pieces, each is a bucket."""

    def __init__(
        self, seed: int, optimizer: str = "signs", width: int = WIDTH, depth: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Pair(width) for _ in range(depth))
        self.finish(optimizer, optimizer == "signs")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    @cg.opaque
    def shrink(self) -> None:
        """Change the weights in a way that no trace sees."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(-1)


@cg.actor
class Block(RecordingStage):
    """A layer with a norm, and with dropout if wanted."""

    def __init__(self, seed: int, optimizer: str = "adam", rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.rate = rate
        self.finish(optimizer, False)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        if self.rate:
            h = functional.dropout(h, self.rate)
        return x + self.down(h)


@cg.actor
class Attention(RecordingStage):
    """Self-attention with several heads; without softmax, of integers."""

    def __init__(self, seed: int, optimizer: str = "adam", causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.causal = causal
        self.finish(optimizer, optimizer == "signs")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        if x.dtype == torch.float64:
            h = q @ k.transpose(-2, -1) @ v
        else:
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.o(h.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)


@cg.actor
class LongAttention(Attention):
    """Self-attention whose plan cuts the sequence, and no rows."""


@cg.actor
class Written(Attention):
    """A layer of a transformer, whose attention is written out."""

    def __init__(self, seed: int, optimizer: str = "adam") -> None:
        super().__init__(seed, optimizer)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.finish(optimizer, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.heads(layer(y)) for layer in (self.q, self.k, self.v))
        h = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        x = x + self.o(h.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


@cg.actor
class Language(RecordingStage):
    """An embedding, and the loss of the words to come; both of a cut vocabulary."""

    def __init__(self, seed: int, optimizer: str = "adam") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.finish(optimizer, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


ROWS = {"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")}
TOWER_PLAN = {
    **ROWS,
    "blocks.*.up.weight": cg.cut(0, "tp"),
    "blocks.*.down.weight": cg.cut(1, "tp"),
}
MLP_PLAN = {**ROWS, "up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}
PLANS: Mapping[type[RecordingStage], Mapping[str, Sharding]] = {
    Mlp: MLP_PLAN,
    Residual: {**ROWS, "up.*": cg.cut(0, "tp")},
    Tower: TOWER_PLAN,
    Block: MLP_PLAN,
    Attention: {**ROWS, "[qkv].weight": cg.cut(0, "tp"), "o.weight": cg.cut(1, "tp")},
    LongAttention: {
        "forward(x)|loss(h)|loss(y)": cg.cut(1, "dp"),
        "[qkv].weight": cg.cut(0, "tp"),
        "o.weight": cg.cut(1, "tp"),
    },
    Written: {
        **MLP_PLAN,
        "[qkv].weight": cg.cut(0, "tp"),
        "o.weight": cg.cut(1, "tp"),
    },
    Language: {**ROWS, "embedding.weight|head.*": cg.cut(0, "tp")},
}
"""Weights are cut along `tp` as is usual, and rows along `dp`."""


HOMES = {
    **dict.fromkeys(("interleaved", "looped-bfs"), (0, 1, 0, 1)),
    **dict.fromkeys(("zb-v", "dualpipe-v"), (0, 1, 1, 0)),
}
"""The mesh of each stage, under schedules of more than one stage on a mesh."""


def meshes(name: str) -> tuple[Mesh, ...]:
    """One mesh for each stage; the world has 8 ranks at most."""
    made: dict[str, Callable[[], tuple[Mesh, ...]]] = {
        "none": lambda: (cg.mesh(dp=1, tp=1),),
        "dp": lambda: (cg.mesh(dp=3, tp=1),),
        "tp": lambda: (cg.mesh(dp=1, tp=2),),
        "dp-tp": lambda: (cg.mesh(dp=2, tp=2),),
        "tp-dp": lambda: (cg.mesh(tp=2, dp=3),),
        "pp-dp-tp": lambda: cg.mesh(pp=2, dp=2, tp=2).unbind("pp"),
        "3+1": lambda: (cg.mesh(dp=3, tp=1), cg.mesh([3], dp=1, tp=1)),
        "overlap": lambda: (cg.mesh(dp=3, tp=1), cg.mesh([2, 3], dp=1, tp=2)),
    }
    return made[name]()


@dataclass(frozen=True)
class Model:
    """Stages, each as its class and what its constructor takes, in order; the last has the loss."""

    stages: Sequence[tuple[type[RecordingStage], tuple[Any, ...]]]

    def plain(self) -> list[RecordingStage]:
        return [cls(*args) for cls, args in self.stages]

    def on(
        self,
        places: Sequence[Mesh],
        plans: Sequence[Any] | None = None,
        store: Sharding | Sequence[Sharding] = cg.whole,
        bucket_bytes: int = BUCKET,
    ) -> list[Any]:
        """The stages on meshes; `store` is of all of them, or of each."""
        chosen = [PLANS[cls] for cls, _ in self.stages] if plans is None else plans
        rests = [store] * len(self.stages) if isinstance(store, Sharding) else store
        each = zip(self.stages, places, chosen, rests, strict=True)
        return [
            cls.on(place, plan=plan, store=rest, bucket_bytes=bucket_bytes)(*args)  # type: ignore[attr-defined]
            for (cls, args), place, plan, rest in each
        ]


def step_of(stages: Sequence[Any], count: int) -> Callable[..., Any]:
    """A step of so many microbatches; it gives the mean loss, and what goes into the losses."""

    def step(x: Tensor, y: Tensor) -> Any:
        losses, outputs = [], []
        for part, target in cg.microbatches((x, y), count):
            for stage in stages:
                part = stage.forward(part)
            loss = stages[-1].loss(part, target)
            cg.backward(loss / count)
            losses.append(loss)
            outputs.append(part)
        for stage in stages:
            stage.update()
        return cg.mean(losses), outputs

    return step


def plain_step(stages: Sequence[RecordingStage], count: int, x: Tensor, y: Tensor) -> Any:
    """The same in one process."""
    losses, outputs = [], []
    for part, target in zip(x.chunk(count), y.chunk(count), strict=True):
        for stage in stages:
            part = stage.forward(part)
        loss = stages[-1].loss(part, target)
        (loss / count).backward()
        losses.append(loss.detach())
        outputs.append(part.detach())
    for stage in stages:
        stage.update()
    return torch.stack(losses).mean(), outputs


def batch(seed: int, rows: int, kind: str, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Rows of `integers`, `reals` or `words`."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "words":
        x, y = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
        return x, y
    shape = (2, rows, LENGTH, width)
    if kind == "integers":
        x, y = torch.randint(-1, 2, shape, generator=generator).double()
    else:
        x, y = torch.randn(shape, generator=generator)
    return x, y


@dataclass(frozen=True)
class Held:
    """The gradients and parameters of a stage in one process after a step, by name."""

    found: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]

    @staticmethod
    def of(stage: RecordingStage) -> Held:
        return Held(stage.found, {n: p.detach().clone() for n, p in stage.named_parameters()})


@dataclass(frozen=True)
class Moment:
    """The results of a step in one process, and the tensors of each stage after it."""

    outputs: Any
    stages: Sequence[Held]


def alone(
    model: Model, rows: int, count: int, kind: str, steps: int = 3, width: int = WIDTH
) -> list[Moment]:
    """Train in one process."""
    stages = model.plain()
    return [
        Moment(plain_step(stages, count, *batch(seed, rows, kind, width)), [*map(Held.of, stages)])
        for seed in range(steps)
    ]


def train(
    model: Model,
    stages: Sequence[Any],
    rows: int,
    count: int,
    schedule: str | None,
    kind: str,
    steps: int = 3,
    width: int = WIDTH,
    fsdp: Any = None,
    fuse: str | None = None,
) -> dict[int, str]:
    """Train both, and compare after each step; return hashes of what this process's ranks have."""
    compiled = compile_step(stages, batch(0, rows, kind, width), count, schedule, fsdp, fuse)
    return run_steps(compiled, model, stages, rows, count, kind, steps, width)


def compile_step(
    stages: Sequence[Any],
    example: tuple[Tensor, Tensor],
    count: int,
    schedule: str | None,
    fsdp: Any = None,
    fuse: str | None = None,
) -> cg.Compiled:
    """Compile a step of so many microbatches."""
    order = {} if schedule is None else {"schedule": cg.schedules.by_name(schedule)}
    lowered = cg.trace(step_of(stages, count)).lower(*example)
    return lowered.compile(fsdp=fsdp, fuse=fuse, **order)


def run_steps(
    compiled: cg.Compiled,
    model: Model,
    stages: Sequence[Any],
    rows: int,
    count: int,
    kind: str,
    steps: int,
    width: int = WIDTH,
) -> dict[int, str]:
    """Take steps as `train` does, of one that is compiled."""
    made = {rank: hashlib.sha256() for stage in stages for rank in stage.instances}
    for seed, moment in enumerate(alone(model, rows, count, kind, steps, width)):
        found = compiled(*batch(seed, rows, kind, width))
        compare_all(stages, found, moment, kind == "integers", f"step {seed}")
        for stage in stages:
            for rank, instance in stage.instances.items():
                note(made[rank], instance)
    return {rank: each.hexdigest() for rank, each in made.items()}


def compare_all(stages: Sequence[Any], found: Any, moment: Moment, exact: bool, what: str) -> None:
    """Hold what a step on meshes gave and left against that of one process."""
    assert_close(found, moment.outputs, exact, what)
    for stage, held in zip(stages, moment.stages, strict=True):
        for rank, instance in stage.instances.items():
            compare(stage, rank, instance, held, exact)


def compare(stage: Any, rank: int, instance: RecordingStage, held: Held, exact: bool) -> None:
    """Hold a rank's pieces of gradients and parameters against the whole ones."""
    assert instance.found.keys() == held.found.keys()
    mine = dict(instance.named_parameters())
    assert mine.keys() == held.parameters.keys()
    for name, parameter in held.parameters.items():
        region = region_of(stage, name, rank)
        what = f"{stage.name}.{name} on rank {rank}"
        if name in held.found:
            gradient = cut_out(held.found[name], region)
            assert_close(instance.found[name], gradient, exact, f"the gradient of {what}")
        assert_close(mine[name].detach(), cut_out(parameter, region), exact, what)


def region_of(stage: Any, name: str, rank: int) -> Region | None:
    """The part of a tensor that a rank of a mesh has; None: all of it."""
    logical = stage._group.logical[name]
    if logical.layout is None:
        return None
    return logical.layout.region(logical.shape, stage.place.position(rank))


def cut_out(tensor: Tensor, region: Region | None) -> Tensor:
    """The part of a tensor that a rank has."""
    return tensor if region is None else piece(tensor, region)


def assert_close(found: Any, expected: Any, exact: bool, what: str) -> None:
    found = tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)
    are_tensors = isinstance(found, Tensor) and isinstance(expected, Tensor)
    if exact and are_tensors and found.dtype == expected.dtype and torch.equal(found, expected):
        return  # what follows would say so, too, in twenty times the time
    rtol, atol = (0.0, 0.0) if exact else (1e-5, 2e-6)
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def note(made: Any, instance: RecordingStage) -> None:
    """Add what a rank holds to a hash."""
    for tensor in (*instance.found.values(), *instance.parameters()):
        made.update(tensor.detach().cpu().contiguous().numpy().tobytes())
