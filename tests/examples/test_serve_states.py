"""Layers that keep states of sequences: each request has a slot, whoever is in its batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.defaults import Given, Hardware, choose
from examples.serve.engine import CgEngine, start
from examples.serve.gpt import GptConfig
from examples.serve.opening import open_model
from examples.serve.parts import Ways
from examples.serve.products import replace_norms
from examples.serve.requests import Request as Asked
from examples.serve.scheduler import Scheduler
from examples.serve.states import Slots, StateName
from examples.serve.work import Chunk, Prefill

from ..models.decoder_serving import spread
from ..models.decoders import decoder
from .serve_driver import GREEDY as SURE
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import GREEDY, logits_of

OPTIONS = replace(
    GREEDY,
    batches=(3,),
    chunks=(8,),
    prompt_tokens=16,
    blocks=24,
    block_size=4,
    context=24,
    warm=False,
    late=True,
)


def saved(kind: str, folder: Path) -> Any:
    model = decoder(kind).eval()
    spread(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def started(folder: Path, **changes: Any) -> CgEngine:
    engine = start(folder, replace(OPTIONS, **changes))
    assert engine is not None
    return engine


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("qwen3_next", 2),
        ("lfm2", 1),
        pytest.param("jamba", 1, marks=pytest.mark.slow),
        pytest.param("falcon_h1", 1, marks=pytest.mark.slow),
    ],
)
def test_companions_chunks_and_preemptions_leave_the_tokens(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    """Of gated delta rules, state spaces of both kinds beside attention, and convolutions."""
    model = saved(kind, tmp_path)
    with use_world(VirtualWorld(ranks)):
        is_mixed = kind == "lfm2"  # with tokens that are drawn, and logits that are adjusted
        engine = started(tmp_path, draws=is_mixed)
        requests = random_requests(8, 5, engine.limits, 6, share=0.5)
        if not is_mixed:
            requests = [replace(each, sampling=SURE) for each in requests]
        habits = Habits(seed=2, arriving=1.0, chunk=8, companions=3, preempting=0.05)
        driver = Driver(engine, habits)
        driver.run(requests)
        assert driver.preempted
        assert driver.packed
        assert not driver.hits
        assert engine.limits.goes_on is (kind != "jamba")
        engine.close()
    assert differences(logits_of(model), requests)[0] == 0


def test_a_model_of_states_alone_is_scheduled_over_few_blocks(tmp_path: Path) -> None:
    """Prompts that begin alike share no block, and one that is preempted begins again."""
    model = saved("mamba2", tmp_path)
    begin = tuple(range(3, 15))
    prompts = [begin, (*begin, 3), (*begin, 4, 5, 6), (7,), begin]
    with use_world(VirtualWorld(1)):
        engine = started(tmp_path, blocks=8)
        scheduler = Scheduler(engine.limits)
        for number, prompt in enumerate(prompts):
            scheduler.add(Asked(number, prompt, 9))
        tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
        while not scheduler.is_idle:
            for ticket in list(scheduler.schedule()):
                scheduler.complete(ticket, engine.submit(ticket.work).result(60))
            pairs = scheduler.take_events().pairs
            for number, token in zip(pairs[::2], pairs[1::2], strict=True):
                tokens[number].append(token)
        engine.close()
    assert scheduler.stats.preemptions
    assert not scheduler.blocks.hits
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens[number]]])).logits[0]
        wanted = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens[number] == wanted, f"request {number}"


def test_work_that_would_spoil_a_state_is_refused(tmp_path: Path) -> None:
    saved("lfm2", tmp_path)
    with use_world(VirtualWorld(1)):
        engine = started(tmp_path)
        assert engine.limits.lengths == (1, 4, 8)
        for length, state, reason in ((5, 1, "5 tokens, of"), (4, 0, "a slot of states is 0")):
            chunk = Chunk((3,) * length, 0, (1, 2), True, SURE, state)
            with pytest.raises(ValueError, match=reason):
                engine.submit(Prefill((chunk,)))
        engine.close()


def test_proposals_are_refused_where_layers_keep_states(tmp_path: Path) -> None:
    saved("lfm2", tmp_path)
    with use_world(VirtualWorld(1)), pytest.raises(ValueError, match="leave out --draft"):
        started(tmp_path, draft_tokens=2)
    plain = GptConfig(layers=1)
    with use_world(VirtualWorld(1)), pytest.raises(ValueError, match="give another --draft"):
        start(plain, replace(OPTIONS, draft_tokens=2, draft=tmp_path))


def test_a_sequence_has_one_block_where_nothing_grows(tmp_path: Path) -> None:
    """And fewer requests fit where states leave no room."""
    saved("mamba2", tmp_path)
    model = open_model(tmp_path)
    options = choose(Hardware("cpu", 8 << 30, 2, False), model, torch.float32, Given()).options
    assert options.block_size == options.context
    assert options.widths == (1,)
    assert options.blocks == 1 + options.batches[-1]
    with pytest.raises(ValueError, match="no room for what layers keep"):
        choose(Hardware("cpu", 40 * model.state, 2, False), model, torch.float32, Given())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "goes_on"), [("mamba", False), ("mamba2", True), ("lfm2", True)])
def test_a_state_that_is_forgotten_is_seen_whatever_the_weights(
    kind: str, goes_on: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """These weights are so small that states hardly matter, until an adapter makes them."""
    decoder(kind).save_pretrained(tmp_path)
    model = open_model(tmp_path)
    part: Any = model.build(range(model.layers), dtype, Ways())
    assert part.goes_on is goes_on


def test_states_are_of_the_dtype_that_the_model_keeps(tmp_path: Path) -> None:
    """A recurrent state stays float32 where weights are shorter."""
    saved("qwen3_next", tmp_path)
    model = open_model(tmp_path)
    part: Any = model.build(range(1), torch.bfloat16, Ways())
    kinds = {name.is_recurrent: state.dtype for name, state in part.states.items()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    assert model.state == sum(state.bytes for state in model.states.values())


def test_slots_of_others_stay_and_new_rows_begin_with_zeros() -> None:
    name = StateName(0, True, 0)
    pool = torch.arange(1.0, 6.0)[:, None].clone()
    slots = Slots({name: pool}, torch.tensor([3, 1]), torch.tensor([True, False]))
    layer = slots.layer(0)
    rows = layer.recurrent_states[0]
    assert rows.tolist() == [[0.0], [2.0]]
    layer.update_recurrent_state(rows + 10)
    slots.keep()
    assert pool.flatten().tolist() == [1.0, 12.0, 3.0, 10.0, 5.0]


class Gated(nn.Module):
    """A norm that may be given a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = x if gate is None else x * gate
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_a_norm_that_takes_a_gate_stays() -> None:
    part = nn.ModuleDict({"norm": Gated()})
    replace_norms(part)
    assert isinstance(part["norm"], Gated)


class OfGroups(nn.Module):
    """A norm over groups of channels, which refuses other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != (2, 4):
            raise ValueError("expected 2 groups of 4 channels")
        return self.weight * x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + self.eps)


def test_a_norm_that_refuses_a_row_stays() -> None:
    part = nn.ModuleDict({"norm": OfGroups()})
    replace_norms(part)
    assert isinstance(part["norm"], OfGroups)
