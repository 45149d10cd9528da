"""`cg.cut_layers`: stages give what the whole model gives, and so do their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .families import FAMILIES, TIED, inputs_of, model_of

pytestmark = pytest.mark.timeout(300)
SLOW = pytest.mark.slow


def run(cuts: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, list[Any]]:
    """The parts of a model, one after the other in plain Python; what they give, and they."""
    parts = [cuts.part(index) for index in range(len(cuts))]
    moving, lent = None, {}
    for part in parts:
        moving = part(moving, **inputs, lent=lent)
        lent |= part.lend()
    return moving, parts


def gradients(parts: list[Any]) -> dict[str, torch.Tensor | None]:
    """By the names of parameters; each is in one part."""
    found: dict[str, torch.Tensor | None] = {}
    for part in parts:
        for name, parameter in part.model.named_parameters():
            assert name not in found
            found[name] = parameter.grad
    return found


def check_gradients(model: nn.Module, parts: list[Any]) -> None:
    found = gradients(parts)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    # Some are nothing but roundings: what is added to all keys does not change attention.
    largest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    for name, grad in wanted.items():
        mine = found[name]
        if grad is None:
            assert mine is None or not mine.any(), name
        else:
            assert mine is not None, name
            torch.testing.assert_close(mine, grad, rtol=1e-5, atol=1e-7 * largest)


@pytest.mark.grid(1)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_model_bit_for_bit(family: str, stages: int) -> None:
    model, inputs = model_of(family), inputs_of(family)
    cuts = cg.cut_layers(model, stages, example=inputs)
    output, parts = run(cuts, inputs)
    wanted = model(**inputs).logits
    assert torch.equal(output.logits, wanted)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    (output.logits * weights).sum().backward()
    check_gradients(model, parts)
    assert sum(stage.elements for stage in cuts) == sum(p.numel() for p in model.parameters())
    assert bool(cuts[-1].borrowed) == (family in TIED and stages > 1)


@cg.actor
class CutStage(nn.Module):
    """A part of a model that `cg.cut_layers` has cut, without a loss."""

    def __init__(self, cuts: Any, index: int) -> None:
        super().__init__()
        self.part = cuts.part(index)

    def lend(self) -> dict[str, torch.Tensor]:
        return self.part.lend()

    def forward(self, moving: Any, inputs: Any, lent: Any) -> Any:
        return self.part(moving, **inputs, lent=lent)

    def logits(self, moving: Any, inputs: Any, lent: Any) -> torch.Tensor:
        return self.part(moving, **inputs, lent=lent).logits


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        *((family, 2) for family in ("Gemma", "Mixtral", "GPT2", "ViT")),
        *(
            pytest.param(family, 2, marks=SLOW)
            for family in ("Llama", "Qwen2", "Qwen3", "Mistral", "Bert")
        ),
        *(pytest.param(family, n, marks=SLOW) for family in FAMILIES for n in (1, 4)),
    ],
)
def test_a_pipeline_trains_as_the_model(family: str, stages: int) -> None:
    """Traced, in microbatches, by a schedule that splits backwards."""
    model, inputs = model_of(family, layers=max(stages, 2)), inputs_of(family)
    wanted = model(**inputs).logits
    weights = torch.randn_like(wanted)
    with use_world(VirtualWorld(stages)):
        cuts = cg.cut_layers(model, stages, example=inputs)
        actors = [CutStage.on(index)(cuts, index) for index in range(stages)]

        @cg.trace
        def step(inputs: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
            lent = {name: value for actor in actors for name, value in actor.lend().items()}
            outputs, losses = [], []
            for mine, chosen in cg.microbatches((inputs, weights), 2):
                moving = None
                for actor, stage in zip(actors, cuts, strict=True):
                    method = actor.logits if actor is actors[-1] else actor.forward
                    moving = method(moving, mine, {name: lent[name] for name in stage.borrowed})
                outputs.append(moving)
                losses.append((moving * chosen).sum())
            cg.backward(*losses)
            return torch.cat(outputs)

        compiled = step.lower(inputs, weights).compile(schedule=cg.schedules.zb_h1())
        found = compiled(inputs, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    (wanted * weights).sum().backward()
    check_gradients(model, [actor.local.part for actor in actors])


def test_costs_decide_where_it_is_cut() -> None:
    model = model_of("Llama", layers=6)

    def lengths(*args: Any, **options: Any) -> list[int]:
        return [len(stage.layers) for stage in cg.cut_layers(model, *args, **options)]

    assert lengths(2) == [3, 3]
    assert lengths(3) == [2, 2, 2]
    assert lengths(2, [1, 1, 1, 1, 1, 5]) == [5, 1]
    assert lengths(2, [0, 1, 1, 1, 1, 1, 1, 4]) == [5, 1]
    assert lengths(2, [4, 1, 1, 1, 1, 1, 1, 0]) == [1, 5]
    assert lengths([1, 3, 2]) == [1, 3, 2]
    assert lengths(2, "bytes") == [3, 3]
    large = model_of("Llama", layers=6, vocab_size=2000)
    assert len(cg.cut_layers(large, 2)[-1].layers) < 3, "the head counts"


def test_the_table() -> None:
    cuts = cg.cut_layers(model_of("GPT2"), [3, 1], example=inputs_of("GPT2", rows=1))
    assert str(cuts).splitlines() == [
        "GPT2LMHeadModel: 4 layers in transformer.h, 2 stages",
        "stage  layers  parameters    FLOPs  of the dearest  besides",
        "    0  0-2         10,848  129,024            100%  transformer.wte, transformer.wpe",
        "    1  3-3          3,312   49,952             39%  transformer.ln_f, uses "
        "transformer.wte.weight of stage 0",
    ]


def test_what_is_frozen_is_in_each_stage_that_uses_it() -> None:
    model, inputs = model_of("GPT2").requires_grad_(False), inputs_of("GPT2")
    cuts = cg.cut_layers(model, 2)
    assert not cuts[1].borrowed
    assert "transformer.wte.weight" in cuts[1].parameters
    output, parts = run(cuts, inputs)
    assert torch.equal(output.logits, model(**inputs).logits)
    tied = parts[1].model
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_a_part_has_no_tensor_of_another() -> None:
    with cg.empty_weights():
        model = model_of("Llama")
    parts = [cg.cut_layers(model, 4).part(index) for index in range(4)]
    assert all(p.is_meta for part in parts for p in part.parameters())
    assert not any(b.is_meta for part in parts for b in part.buffers()), "tables are computed"
    names = [set(part.model.state_dict()) for part in parts]
    assert sum(map(len, names)) == len(set().union(*names)) == len(model.state_dict())


def test_gradients_flow_through_checkpointed_layers() -> None:
    model, inputs = model_of("Llama").train(), inputs_of("Llama")
    model.gradient_checkpointing_enable()
    output, parts = run(cg.cut_layers(model, 2), inputs)
    output.logits.square().sum().backward()
    model(**inputs).logits.square().sum().backward()
    check_gradients(model, parts)


class Marks(nn.Module):
    """Gives what it computes by its weights, and places, which depend on inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(x), x.cumsum(0)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


class Tower(nn.Module):
    """Layers, a module, a parameter and a dropout, and a forward that runs them as a test says."""

    def __init__(self, way: str = "chain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.embed, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.marks = Marks()
        self.table = nn.Parameter(torch.randn(4))
        self.way, self.stash = way, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = self.embed(x) if self.way == "row" else x
        if self.way == "module draws":
            row = self.dropout(x * self.table)
        if self.way == "draws":
            row = nn.functional.dropout(x * self.table)
        if self.way in ("places", "marks"):
            marks, places = self.marks(x)
            x = x + marks + self.marks.read(places) if self.way == "places" else x
            row = places if self.way == "places" else marks + places
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                first = x
            x = self._between(x, first, row)
        return self.layers[0](x) if self.way == "again" else x

    def _between(self, x: torch.Tensor, first: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "doubles":
                return 2 * x
            case "skips":
                return x + first
            case "table":
                return x * self.table
            case "row" | "draws" | "module draws" | "places" | "marks":
                return x + row[:1]
            case "writes":
                return x.mul_(2)
            case _:
                return x


class Hoarder(nn.Module):
    """A layer that takes what the layer before it has computed inside, and keeps such a tensor."""

    def __init__(self, hoard: list[torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.hoard = nn.Linear(4, 4), hoard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hoard:
            x = x + self.hoard.pop()
        self.hoard.append(self.linear(x))
        return self.hoard[-1].sin()


@pytest.mark.parametrize("model", [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), Tower()])
def test_any_module_with_a_chain(model: nn.Module) -> None:
    name = "input" if isinstance(model, nn.Sequential) else "x"
    x = torch.randn(3, 4)
    cuts = cg.cut_layers(model, 3, example={name: x})
    moving: Any = None
    for index in range(3):
        moving = cuts.part(index)(moving, x)
    assert torch.equal(moving, model(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: cg.cut_layers(model_of("Llama"), 5),
            "5 stages are asked for, and .* has 4 layers",
        ),
        (lambda: cg.cut_layers(model_of("Llama"), 0), "0 stages are asked for"),
        (lambda: cg.cut_layers(model_of("Llama"), [1, 2]), "stages of 1, 2 layers are asked for"),
        (lambda: cg.cut_layers(model_of("Llama"), 2, [1, 2]), "2 costs are given for the 4 layers"),
        (lambda: cg.cut_layers(model_of("Llama"), 2, "time"), "costs is 'time'; give"),
        (lambda: cg.cut_layers(nn.Linear(2, 2), 1), "has no ModuleList or Sequential, so"),
        (lambda: cg.cut_layers(Tower(), 2), "does not know what Tower takes; give it inputs"),
        (
            lambda: cg.cut_layers(model_of("Llama"), 2, layers="model.norm"),
            "has a LlamaRMSNorm at 'model.norm', where .* there are 'model.layers'",
        ),
        (
            lambda: cg.cut_layers(model_of("Llama"), 2, example={"input_ids": torch.zeros(2)}),
            "LlamaForCausalLM does not run on the example inputs input_ids: ",
        ),
        (lambda: cut_tower("writes"), "the model writes into what layers.0 has given"),
        (
            lambda: cut_tower("draws"),
            "layers.1 takes random numbers that are drawn before layers.0 has run, and each stage "
            "would draw others; set this dropout of the model to 0",
        ),
        (
            lambda: cg.cut_layers(hoarders(), 2, example={"input": torch.zeros(1, 4)}),
            "in front of 1, for one: 1 takes what 0 computes inside and does not give",
        ),
        (lambda: cut_tower("again"), "Tower runs layers.0 out of order, or more than once"),
        (
            lambda: cg.cut_layers(Reader(), 2, example={"x": torch.zeros(1, 4)}),
            "Reader cannot be traced: what aten.* depends on the data, at .*test_cut_layers.py:.*, "
            "in forward. Take a form without it: .*cg.expert_linear",
        ),
        (
            lambda: cg.cut_layers(Asserting(), 2, example={"x": torch.zeros(1, 4)}),
            "It is in an assertion: python -O leaves assertions out",
        ),
    ],
)
def test_what_cannot_be_cut(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def cut_tower(way: str) -> Any:
    return cg.cut_layers(Tower(way), 2, example={"x": torch.zeros(1, 4)})


def hoarders() -> nn.Module:
    hoard: list[torch.Tensor] = []
    return nn.Sequential(Hoarder(hoard), Hoarder(hoard))


class Reader(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1 else x


class Asserting(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.max().item() > 9
        return super().forward(x)


class Stateful(nn.Linear):
    """A layer that keeps what it has given."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = super().forward(x)
        self.sizes.append(len(x))
        return self.state


def test_a_cut_leaves_the_states_of_layers() -> None:
    layers = [Stateful(4, 4) for _ in range(2)]
    for layer in layers:
        layer.sizes = []
    model = nn.Sequential(*layers)
    cuts = cg.cut_layers(model, 2, example={"input": torch.zeros(1, 4)})
    for layer in (*layers, *(cuts.part(i).model[i] for i in range(2))):
        assert layer.state is None
        assert layer.sizes == []


@pytest.mark.parametrize(
    ("way", "crossing"),
    [
        *(("chain", 1), ("doubles", 1), ("skips", 2), ("table", 1), ("row", 2)),
        *(("module draws", 2), ("places", 1), ("marks", 3)),
    ],
)
def test_what_is_around_the_layers(way: str, crossing: int) -> None:
    """What later stages need of earlier ones goes to them, and the rest is computed again."""
    model, x = Tower(way), torch.randn(3, 4)
    cuts = cg.cut_layers(model, [1, 2, 1], example={"x": x})
    torch.manual_seed(0)
    wanted = model(x)
    parts = [cuts.part(index) for index in range(3)]
    torch.manual_seed(0)
    lent = parts[0].lend() | parts[1].lend()
    entering = parts[1](parts[0](None, x), x, lent=lent)
    assert (1 if isinstance(entering, torch.Tensor) else len(entering)) == crossing
    output = parts[2](entering, x, lent=lent)
    assert torch.equal(output, wanted)
    wanted.square().sum().backward()
    output.square().sum().backward()
    check_gradients(model, parts)


def test_cuts_are_where_nothing_is_computed_inside() -> None:
    """What the first two layers compute inside does not leave them."""
    hoard: list[torch.Tensor] = []
    layers = [Hoarder(hoard), Hoarder(hoard), *(nn.Linear(4, 4) for _ in range(2))]
    example = {"input": torch.zeros(1, 4)}
    cuts = cg.cut_layers(nn.Sequential(*layers), 2, [9, 9, 1, 1], example=example)
    assert [len(stage.layers) for stage in cuts] == [2, 2]


def test_a_part_says_what_it_takes() -> None:
    model, inputs = model_of("GPT2"), inputs_of("GPT2")
    parts = [cg.cut_layers(model, 2).part(index) for index in range(2)]
    with pytest.raises(ValueError, match="the first part takes None of the part before it"):
        parts[0](torch.zeros(1), **inputs)
    moving = parts[0](None, **inputs)
    with pytest.raises(ValueError, match=r"uses transformer.wte.weight of another part; give it"):
        parts[1](moving, **inputs)
    with pytest.raises(ValueError, match="this part takes 1 tensors of the part before it"):
        parts[1](None, **inputs, lent=parts[0].lend())
