"""Language models of transformers train on meshes and in pipelines of them as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ...sampling import scale
from ..test_models import causal_lm

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300)]

MICROBATCHES = 4
SLOW = pytest.mark.slow


def model_of(family: str, attention: str) -> Any:
    return causal_lm(family, num_key_value_heads=2, attn_implementation=attention)


@cg.actor
class DecoderStage(nn.Module):
    """Some of a model's decoder layers; the first has the embedding, the last norm and head."""

    def __init__(self, family: str, attention: str, index: int, count: int) -> None:
        super().__init__()
        model = model_of(family, attention)
        number = len(model.model.layers) // count
        self.layers = model.model.layers[index * number : (index + 1) * number]
        self.rotary = model.model.rotary_emb
        if index == 0:
            self.embed_tokens = model.model.embed_tokens
        if index == count - 1:
            self.norm, self.lm_head = model.model.norm, model.lm_head
        self.is_masked = attention == "eager"  # sdpa is causal where there is no mask
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._decode(self.embed_tokens(tokens))

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.norm(self._decode(h)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def whole(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed_tokens(tokens), labels)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _decode(self, h: torch.Tensor) -> torch.Tensor:
        length = h.shape[1]
        positions = torch.arange(length)[None]
        mask = None
        if self.is_masked:
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotary = self.rotary(h, positions)
        for layer in self.layers:
            h = layer(h, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return h


ARGUMENTS = {"embed(tokens)|loss(h)|loss(labels)|whole(tokens)|whole(labels)": cg.cut(0, "dp")}


@pytest.mark.parametrize(
    ("family", "attention", "stages", "rows"),
    [
        ("qwen2", "sdpa", 2, 8),  # one row on each rank
        # Two on some, one on others; `test_hf_training.py` has the family in a default run.
        pytest.param("llama", "eager", 1, 12, marks=SLOW),
        pytest.param("qwen2", "eager", 2, 12, marks=SLOW),
        pytest.param("llama", "sdpa", 1, 16, marks=SLOW),
    ],
)
def test_losses_are_those_of_one_process(
    family: str, attention: str, stages: int, rows: int
) -> None:
    plan = cg.plans.hf(model_of(family, attention)) | cg.plan(ARGUMENTS)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(31, (rows, 7), generator=generator) for _ in range(2))
    steps = 20 if scale() > 1 else 5
    with use_world(VirtualWorld(4 * stages)):
        actors = [
            DecoderStage.on(cg.mesh(range(4 * i, 4 * i + 4), dp=2, tp=2), plan=plan)(
                family, attention, i, stages
            )
            for i in range(stages)
        ]

        @cg.trace
        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            losses = []
            for mine, theirs in cg.microbatches((tokens, labels), MICROBATCHES):
                if stages == 1:
                    loss = actors[0].whole(mine, theirs)
                else:
                    loss = actors[1].loss(actors[0].embed(mine), theirs)
                cg.backward(loss / MICROBATCHES)
                losses.append(loss)
            for actor in actors:
                actor.update()
            return cg.mean(losses)

        compiled = step.lower(tokens, labels).compile(schedule=cg.schedules.one_f_one_b())
        if stages == 2:  # Megatron's count: of the embedding, and two in each direction of a layer
            embedding = plan.of_tensor("model.embed_tokens.weight") is not None
            assert _reductions(compiled, "mb = 0") == embedding + 2 * 2
        found = [compiled(tokens, labels).item() for _ in range(steps)]
    reference = DecoderStage(family, attention, 0, 1)
    for step_number, mine in enumerate(found):
        total = 0.0
        for pair in zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            loss = reference.whole(*pair) / MICROBATCHES
            loss.backward()
            total += loss.item()
        reference.update()
        assert abs(mine - total) < 1e-5, f"step {step_number}: {mine}, and {total} in one process"
    assert found[-1] < found[0] - 0.1


def _reductions(compiled: cg.Compiled, words: str) -> int:
    """The reductions in the program of rank 0 that have some words in their lines."""
    program = compiled.as_text().partition("program @1(")[0]
    return sum(" = all_reduce(" in line and words in line for line in program.splitlines())
