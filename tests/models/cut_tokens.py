"""Train a step of tiny decoders whose tokens are cut, and hold gradients against one process.

mpiexec -n 4 python -m tests.models.cut_tokens "ep 2, cp 2" runs what crosses processes; arguments
are names of `MPI`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

import cg

from ..tracer.groups.training import cut_out, region_of
from .training import training_step

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
_OPT = {"word_embed_proj_dim": 16, "ffn_dim": 32, "max_position_embeddings": 32, "dropout": 0.0}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
_SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _BIASES),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 4}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma": ("Gemma", {"head_dim": 4}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", _GPT2 | _NO_DROPOUT),
    "opt": ("OPT", _OPT),
    "neox": ("GPTNeoX", {}),
    "cohere": ("Cohere", {}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _SHARED | {"shared_expert_intermediate_size": 16}),
}
"""By name the first part of the names of transformers' classes, and what differs from `SIZES`."""


def decoder(family: str) -> Any:
    """A model, float64, of seed 0."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | own)
    heads = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{heads}")(config).double()


@cg.actor
class TokenStage(nn.Module):
    """A part of a model, and the gradients that its update has found."""

    def __init__(self, cuts: Any, index: int) -> None:
        super().__init__()
        self.part = cuts.part(index)
        self.last: dict[str, Tensor] = {}

    def lend(self) -> Any:
        return self.part.lend()

    def forward(self, moving: Any, ids: Tensor, lent: Mapping[str, Any]) -> Any:
        return self.part(moving, input_ids=ids, use_cache=False, lent=lent)

    def loss(self, moving: Any, ids: Tensor, labels: Tensor, lent: Mapping[str, Any]) -> Tensor:
        return loss_of(self.forward(moving, ids, lent), labels)

    def update(self) -> None:
        pairs = self.part.model.named_parameters()
        self.last = {name: p.grad.clone() for name, p in pairs if p.grad is not None}


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Shape:
    """The ranks of a step, and what their axes cut.

    Attributes:
        axes: the sizes of the axes of a stage; `tp` is one of them.
        sequence: those that cut tokens, the major one first.
        stages: how many there are.
        length: of a window.
        order: the order of cut tokens.
        store: the axes along which parameters rest in pieces.
        lent: the cut of what a stage lends.
        schedule: the name of a schedule.
    """

    axes: dict[str, int]
    sequence: tuple[str, ...] = ("tp",)
    stages: int = 1
    length: int = 6
    order: Literal["rows", "zigzag"] = "rows"
    store: tuple[str, ...] = ()
    lent: Any = field(default=cg.whole)
    schedule: str = "1f1b"

    def plan(self, model: Any) -> cg.ShardingPlan:
        """The plan of the stages of a model."""
        names = [axis for axis in ("dp", "ep") if axis in self.axes]
        rows = cg.cut(0, *names) if names else cg.whole
        tokens = [axis for axis in self.sequence if axis != "tp"]
        inputs = rows & cg.cut(1, *tokens, order=self.order) if tokens else rows
        moving = rows & cg.cut(1, *self.sequence, order=self.order) if self.sequence else rows
        shardings = {
            "forward(moving)|loss(moving)": moving,
            "forward(ids)|loss(ids)|loss(labels)": inputs,
            "forward(lent)|loss(lent)": self.lent,
        }
        experts = "ep" if "ep" in self.axes else None
        own = cg.plans.hf(model, batch=None, experts=experts, sequence=self.sequence or None)
        return cg.plan(shardings) | own


def batch(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(3, VOCABULARY, (2, 8, length), generator=generator)
    return ids, labels


def compiled(model: Any, shape: Shape) -> tuple[list[Any], cg.Compiled]:
    """The stages of a model, and a step of two microbatches."""
    example = {"input_ids": torch.zeros(1, shape.length, dtype=torch.int64), "use_cache": False}
    cuts = cg.cut_layers(model, shape.stages, example=example)
    places = cg.mesh(pp=shape.stages, **shape.axes).unbind("pp")
    plan = shape.plan(model)
    store = cg.cut(0, *shape.store) if shape.store else cg.whole
    make: Callable[..., Any] = TokenStage.on  # type: ignore[attr-defined]
    stages = [make(place, plan=plan, store=store)(cuts, i) for i, place in enumerate(places)]
    lowered = training_step(stages, cuts).lower(*batch(shape.length))
    return stages, lowered.compile(schedule=cg.schedules.by_name(shape.schedule))


def hold_against_one_process(family: str, shape: Shape, tolerance: float = 1e-10) -> cg.Compiled:
    """Run a step, and compare its loss and all gradients with those of plain transformers."""
    model = decoder(family)
    stages, step = compiled(model, shape)
    ids, labels = batch(shape.length)
    loss = float(step(ids, labels))
    plain = copy.deepcopy(model)
    if plain._can_set_experts_implementation():
        plain.set_experts_implementation("eager")
    expected = loss_of(plain(input_ids=ids, use_cache=False), labels)
    expected.backward()
    assert abs(loss - expected.item()) < tolerance, (loss, expected.item())
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for stage in stages:
        for rank, instance in stage.instances.items():
            names = {name for name, _ in instance.part.model.named_parameters()}
            assert instance.last.keys() == names & gradients.keys()
            for name, mine in instance.last.items():
                region = region_of(stage, f"part.model.{name}", rank)
                theirs = cut_out(gradients[name], region)
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    return step


MPI = {
    "tp 2 in two stages": ("llama", Shape({"dp": 1, "tp": 2}, stages=2, length=5)),
    "cp 2, tp 2": ("qwen2_moe", Shape({"cp": 2, "tp": 2}, ("cp", "tp"), length=7)),
    "ep 2, cp 2": ("mixtral", Shape({"ep": 2, "cp": 2, "tp": 1}, ("cp",), length=7)),
}
"""What four ranks run in processes of their own."""


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        hold_against_one_process(*MPI[name])
        print(f"{name}: rank {cg.rank()} agrees")


if __name__ == "__main__":
    main()
