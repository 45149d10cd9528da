"""Train a tiny Qwen2 on groups of ranks; compare losses with one process, and traffic with DTensor.

    python -m cg.launch -n 8 benchmarks/qwen2_groups.py [--steps 20]

The model is that of transformers, unchanged. cg trains it as a pipeline of two stages, each of them
data and tensor parallel on four ranks, by the plan that the model brings. On four ranks it trains
it data and tensor parallel, without and with stored parameters (`store=`), and so does torch, by
DTensor with DDP's one reduction and with FSDP2. Losses must be those of one process. Of a step on
four ranks the collectives of rank 0 are counted, and the bytes that it receives by them; cg must
not have more of either.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from all_reduce import join_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cg
from cg.ir.ops import AllGather, AllReduce, Collective, Recv, ReduceScatter
from cg.ir.ops.module import Program
from cg.ir.types import FutureType, TensorType

ROWS, TOKENS, VOCABULARY, MICROBATCHES = 8, 7, 64, 4
TOLERANCE = 1e-5


def make_model() -> Any:
    """Qwen2 of two layers, with fewer heads of keys than of queries."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.Qwen2ForCausalLM(config)


class Part(nn.Module):
    """Some of the model's layers; the first part has the embedding, the last norm and head."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        whole = make_model()
        number = len(whole.model.layers) // count
        self.layers = whole.model.layers[index * number : (index + 1) * number]
        self.rotary = whole.model.rotary_emb
        if index == 0:
            self.embed_tokens = whole.model.embed_tokens
        if index == count - 1:
            self.norm, self.lm_head = whole.model.norm, whole.lm_head
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._decode(self.embed_tokens(tokens))

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self._decode(h)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def whole(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embed_tokens(tokens), labels)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.whole(tokens, labels)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _decode(self, h: Tensor) -> Tensor:
        positions = torch.arange(h.shape[1])[None]
        rotary = self.rotary(h, positions)
        for layer in self.layers:
            h = layer(h, position_ids=positions, position_embeddings=rotary)
        return h


Actor = cg.actor(type("Actor", (Part,), {"__doc__": "A part of the model as an actor."}))
ARGUMENTS = {"embed(tokens)|loss(h)|loss(labels)|whole(tokens)|whole(labels)": cg.cut(0, "dp")}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(VOCABULARY, (2, ROWS, TOKENS), generator=generator)
    return tokens, labels


@dataclass
class Traffic:
    """Of a rank in a step.

    Attributes:
        collectives: by kind.
        received: bytes that it gets by them, as rings would bring them.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    received: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.collectives.values())

    def add(self, kind: str, whole: int, ranks: int) -> None:
        """A collective among ranks, of which `whole` is the larger of operand and result."""
        self.collectives[kind] += 1
        rounds = 2 if kind == "all_reduce" else 1
        self.received += rounds * whole * (ranks - 1) / ranks

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items()))
        return f"{self.count} collectives ({kinds}), {self.received:.0f} bytes received"


_KINDS = {AllReduce: "all_reduce", AllGather: "all_gather", ReduceScatter: "reduce_scatter"}


def traffic_of(program: Program) -> Traffic:
    """The collectives and messages of a rank's program."""
    found = Traffic()
    for op in program.ops:
        if isinstance(op, Collective):
            types = [value.type for value in (*op.operands, *op.results)]
            found.add(_KINDS[type(op)], max(map(_nbytes, types)), len(op.group.ranks))
        elif isinstance(op, Recv):
            found.collectives["message"] += 1
            found.received += _nbytes(op.result.type)
    return found


def _nbytes(type_: Any) -> int:
    plain = type_.value if isinstance(type_, FutureType) else type_
    return plain.nbytes if isinstance(plain, TensorType) else 0


class Watch(TorchDispatchMode):
    """Counts the bytes of torch's collectives."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        kind = next((k for k in ("reduce_scatter", "all_gather") if k in name), None)
        kind = "all_gather" if "allgather" in name else kind
        kind = "all_reduce" if "allreduce" in name or "all_reduce" in name else kind
        if kind is not None and ("c10d" in name):
            sizes = [t.nbytes for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            whole, least = max(sizes), min(sizes)
            self.traffic.add(kind, whole, 2 if kind == "all_reduce" else round(whole / least))
        return result


def pipeline(steps: int) -> tuple[list[float], Traffic]:
    """Two stages, each on 2 x 2 ranks, under 1F1B."""
    grid = cg.mesh(pp=2, dp=2, tp=2)
    plan = cg.plans.hf(make_model()) | cg.plan(ARGUMENTS)
    first, last = (
        Actor.on(place, plan=plan)(index, 2)  # type: ignore[attr-defined]
        for index, place in enumerate(grid.unbind("pp"))
    )

    @cg.trace
    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for mine, theirs in cg.microbatches((tokens, labels), MICROBATCHES):
            losses.append(last.loss(first.embed(mine), theirs))
        loss = cg.mean(losses)
        cg.backward(loss)
        first.update()
        last.update()
        return loss

    compiled = step.lower(*batch()).compile(schedule=cg.schedules.one_f_one_b())
    return [float(compiled(*batch())) for _ in range(steps)], Traffic()


def one_group(steps: int, stored: bool) -> tuple[list[float], Traffic]:
    """The whole model, on 2 x 2 ranks."""
    plan = cg.plans.hf(make_model()) | cg.plan(ARGUMENTS)
    store = cg.cut(0, "dp") if stored else cg.whole
    actor = Actor.on(cg.mesh(dp=2, tp=2), plan=plan, store=store)(0, 1)  # type: ignore[attr-defined]

    @cg.trace
    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = actor.whole(tokens, labels)
        cg.backward(loss)
        actor.update()
        return loss

    # Parameters are gathered once a step, so their number of buckets costs no memory: two do.
    kept = cg.fsdp(bucket="layers", keep="step") if stored else None
    compiled = step.lower(*batch()).compile(fsdp=kept)
    losses = [float(compiled(*batch())) for _ in range(steps)]
    return losses, traffic_of(compiled.module.program_of(0))


def torch_group(steps: int, stored: bool, mesh: DeviceMesh) -> tuple[list[float], Traffic]:
    """The whole model by DTensor, on the four ranks of a mesh."""
    model = Part(0, 1)
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        **{f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    if stored:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    group = mesh["dp"].get_group()
    tokens, labels = (each.chunk(2)[mesh["dp"].get_local_rank()] for each in batch())
    losses, traffic = [], Traffic()
    for _ in range(steps):
        traffic, debug = Traffic(), CommDebugMode()
        with debug, Watch(traffic):
            loss = model(tokens, labels)
            loss.backward()
            if not stored:  # as DDP does, but in a single bucket
                _reduce(list(model.parameters()), group)
        counted = sum(debug.get_comm_counts().values())
        assert counted <= traffic.count, f"CommDebugMode has seen {counted}, and not {traffic}"
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(float(total) / 2)
    return losses, traffic


def _reduce(parameters: list[nn.Parameter], group: Any) -> None:
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
    flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
    dist.all_reduce(flat, group=group)
    flat /= 2
    at = 0
    for grad in grads:
        if grad is not None:
            grad.copy_(flat[at : at + grad.numel()].view(grad.shape))
            at += grad.numel()


def one_process(steps: int, microbatches: int) -> list[float]:
    """The losses that all others must have."""
    model, losses = Part(0, 1), []
    for _ in range(steps):
        total = 0.0
        for pair in zip(*(each.chunk(microbatches) for each in batch()), strict=True):
            loss = model.whole(*pair) / microbatches
            loss.backward()
            total += float(loss)
        model.update()
        losses.append(total)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if cg.world_size() < 4:
        raise SystemExit("this needs 4 ranks, or 8: python -m cg.launch -n 8 " + __file__)
    torch.set_num_threads(1)
    join_gloo()
    arms: dict[str, Callable[[], tuple[list[float], Traffic]]] = {}
    if cg.world_size() >= 8:
        arms["cg, PP2 x DP2 x TP2"] = lambda: pipeline(steps)
    arms["cg, DP2 x TP2"] = lambda: one_group(steps, False)
    arms["cg, DP2 x TP2, stored"] = lambda: one_group(steps, True)
    found = {name: run() for name, run in arms.items()}
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    for name, stored in (("DTensor, one all-reduce", False), ("DTensor and FSDP2", True)):
        if cg.rank() < 4:
            found[name] = torch_group(steps, stored, mesh)
    cg.barrier()
    if cg.rank() == 0:
        report(found, steps)
    dist.destroy_process_group()


def report(found: Mapping[str, tuple[list[float], Traffic]], steps: int) -> None:
    """Print a line for each, and hold them against one process and against each other.

    Raises:
        AssertionError: losses differ, or cg has more collectives or bytes.
    """
    for name, (losses, traffic) in found.items():
        right = one_process(steps, MICROBATCHES if "PP2" in name else 1)
        worst = max(abs(mine - other) for mine, other in zip(losses, right, strict=True))
        assert worst < TOLERANCE, f"{name}: losses differ by {worst}"
        shown = str(traffic) if traffic.count else ""
        print(f"{name}: {steps} losses differ by {worst:.1e} at most  {shown}", flush=True)
    pairs = [
        ("cg, DP2 x TP2", "DTensor, one all-reduce"),
        ("cg, DP2 x TP2, stored", "DTensor and FSDP2"),
    ]
    for mine, theirs in pairs:
        one, other = found[mine][1], found[theirs][1]
        assert one.received <= other.received, f"{mine} has {one}, {theirs} {other}"
        assert one.count <= other.count, f"{mine} has {one}, {theirs} {other}"
        print(f"{mine} has no more collectives or bytes than {theirs}", flush=True)


if __name__ == "__main__":
    main()
