"""Models of transformers within a limit of memory: the same losses and weights, bit for bit."""

from __future__ import annotations

import pytest
import torch
import transformers

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .training import TrainedPart, training_step

pytestmark = pytest.mark.timeout(300)


def losses_and_weights(memory: int | None) -> tuple[list[torch.Tensor], int]:
    """The losses of three steps, then all weights, and the highest peak."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(48, (8, 12))
    cuts = cg.cut_layers(model, stages=2, example={"input_ids": ids[:2]})
    with use_world(VirtualWorld(2)):
        actors = [TrainedPart.on(rank)(cuts, rank) for rank in range(2)]
        lowered = training_step(actors, cuts, 4).lower(ids, ids)
        compiled = lowered.compile(memory=memory)
        peak = max(plan.peak for plan in compiled.memory_analysis())
        found = [compiled(ids, ids) for _ in range(3)]
        found += [p.detach() for actor in actors for p in actor.local.parameters()]
    return found, peak


@pytest.mark.slow
def test_a_qwen2_trains_in_less_memory_with_the_same_bits() -> None:
    expected, peak = losses_and_weights(None)
    memory = int(0.6 * peak)
    found, less = losses_and_weights(memory)
    assert less <= memory
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
