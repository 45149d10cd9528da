"""Train a tiny decoder in several shapes of ranks, and hold it against plain transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.passes.placement.choose_dispatch import Dispatch
from cg.tracer.function.groups import plans
from cg.tracer.values.mesh import mesh
from cg.tracer.values.pieces import lay_out

from .decoder_serving import generated, generated_without_cache, serve
from .decoders import BESIDE_ANOTHER, LENGTH, VOCABULARY, class_of, decoder
from .training import TOLERANCE, compare, gradients_of, train_once

STEPS, ROWS = 3, 4
STEEP = ("gemma4", "gemma4_unified")
"""Tiny models that learn slowly. At the usual rate they are soon so steep that plain transformers
itself gives other gradients than within the tolerance, if it takes the rows in another order."""
FORWARDS_FIRST = ("gemma3n", "gemma3n_text")
"""Types whose forward writes to a parameter, which it clamps: no backward may run before the next
forward has, so the schedule is `gpipe`."""
EXAMPLE = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64), "use_cache": False}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(3, VOCABULARY, (STEPS, ROWS, LENGTH), generator=generator))


def rate_of(model: Any) -> float:
    """The rate at which a model learns."""
    return 0.005 if model.config.model_type.removesuffix("_text") in STEEP else 0.05


def loss_of(output: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = output.logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass
class Plain:
    """The training of a model in one process: after each step its loss and its gradients."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def train_plainly(model: Any) -> Plain:
    """With experts by transformers' own loop, whatever the model's default is."""
    model = copy.deepcopy(model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate_of(model))
    record = Plain()
    for ids in batches():
        loss = loss_of(model(input_ids=ids, use_cache=False), ids)
        loss.backward()
        record.losses.append(loss.item())
        record.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return record


@cg.actor
class DecoderStage(nn.Module):
    """A part of a cut model, what trains it, and the gradients of its last update."""

    def __init__(self, cuts: Any, index: int) -> None:
        super().__init__()
        self.part = cuts.part(index)
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=rate_of(self.part.model))
        self.last: dict[str, torch.Tensor] = {}

    def lend(self) -> dict[str, torch.Tensor]:
        return self.part.lend()  # type: ignore[no-any-return]

    def forward(self, moving: Any, ids: torch.Tensor, lent: Mapping[str, Any]) -> Any:
        return self.part(moving, input_ids=ids, use_cache=False, lent=lent)

    def loss(self, moving: Any, ids: torch.Tensor, lent: Mapping[str, Any]) -> torch.Tensor:
        return loss_of(self.part(moving, input_ids=ids, use_cache=False, lent=lent), ids)

    def update(self) -> None:
        self.last = gradients_of(self.part.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(
    actors: list[Any], cuts: Any, microbatches: int, plain: Plain, dispatch: Dispatch = "auto"
) -> Any:
    """Train, compare losses and gradients after each step, and return the compiled step."""

    @cg.trace
    def step(ids: torch.Tensor) -> torch.Tensor:
        return train_once(actors, cuts, ids, microbatches)  # type: ignore[no-any-return]

    writes = cuts.model.config.model_type in FORWARDS_FIRST
    schedule = cg.schedules.gpipe() if writes else None
    compiled = step.lower(batches()[0]).compile(schedule=schedule, dispatch=dispatch)
    for ids, loss, gradients in zip(batches(), plain.losses, plain.gradients, strict=True):
        torch.testing.assert_close(float(compiled(ids)), loss, rtol=TOLERANCE, atol=TOLERANCE)
        compare(actors, gradients)
    return compiled


def two_stages(model: nn.Module, plain: Plain) -> None:
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model, 2, example=EXAMPLE)
        actors = [DecoderStage.on(index)(cuts, index) for index in range(2)]  # type: ignore[attr-defined]
        train(actors, cuts, 2, plain)


def tensor_parallel(model: nn.Module, plain: Plain) -> None:
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model, 1, example=EXAMPLE)
        plan = cg.plans.hf(model, batch=None)
        actor = DecoderStage.on(cg.mesh(tp=2), plan=plan)(cuts, 0)  # type: ignore[attr-defined]
        train([actor], cuts, 1, plain)
        assert any(tensor.layout is not None for tensor in actor._group.logical.values())


def fully_sharded(model: nn.Module, plain: Plain) -> None:
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model, 1, example=EXAMPLE)
        on = DecoderStage.on  # type: ignore[attr-defined]
        actor = on(cg.mesh(dp=2), plan={"loss(ids)": cg.cut(0, "dp")}, store=cg.cut(0, "dp"))(
            cuts, 0
        )
        train([actor], cuts, 1, plain)


@cg.actor
class WholeDecoder(nn.Module):
    """A model that is not cut; it has the attributes of a stage."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=rate_of(model))
        self.last: dict[str, torch.Tensor] = {}

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.part.model(input_ids=ids, use_cache=False), ids)

    def update(self) -> None:
        self.last = gradients_of(self.part.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole_and_sharded(model: nn.Module, plain: Plain) -> None:
    """Without a cut, the batch and the parameters over two ranks."""
    plan = {"loss(ids)": cg.cut(0, "dp")}
    with use_world(VirtualWorld(2)):
        on = WholeDecoder.on  # type: ignore[attr-defined]
        actor = on(cg.mesh(dp=2), plan=plan, store=cg.cut(0, "dp"))(model)

        @cg.trace
        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = cg.mean([actor.loss(mine) for mine in cg.microbatches(ids, 2)])
            cg.backward(loss)
            actor.update()
            return loss

        for ids, loss, gradients in zip(batches(), plain.losses, plain.gradients, strict=True):
            torch.testing.assert_close(float(step(ids)), loss, rtol=TOLERANCE, atol=TOLERANCE)
            compare([actor], gradients)


def saved_and_reopened(kind: str, model: nn.Module, folder: Path) -> None:
    """Two stages are filled from a folder, trained, saved, and opened by transformers."""
    model.save_pretrained(folder / "first")
    weights = cg.pretrained(folder / "first")
    weights.check(model)
    with cg.empty_weights():
        empty = decoder(kind)
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(empty, 2, example=EXAMPLE)
        actors = [
            DecoderStage.on(index, init=weights)(cuts, index)  # type: ignore[attr-defined]
            for index in range(2)
        ]
        for actor, stage in zip(actors, cuts, strict=True):
            mine = dict(actor.instances[actor.place.ranks[0]].part.model.named_parameters())
            for name in stage.parameters:
                assert torch.equal(mine[name], model.get_parameter(name)), name
        cg.save_checkpoint(folder / "step-1", actors, like=folder / "first")
    opened: Any = class_of(kind)
    reopened = opened.from_pretrained(folder / "step-1")
    for name, parameter in model.named_parameters():
        assert torch.equal(reopened.get_parameter(name), parameter), name


SHAPES: Mapping[str, Callable[[nn.Module, Plain], None]] = {
    "two stages": two_stages,
    "tp": tensor_parallel,
    "fsdp": fully_sharded,
}
PLAN, SAVED, SERVED = "plan", "saved", "served"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        kind: "equal" to plain transformers, "refused" by an error of cg, "not yet", "plain fails"
            if plain transformers raises an error, or generates other tokens without its cache, or
            "not tried"; of a plan, "brought" by the model or "derived".
        reason: why, if there is nothing equal and no plan.
    """

    kind: str
    reason: str = ""

    def as_record(self) -> list[str]:
        return [self.kind, self.reason] if self.reason else [self.kind]


def plan_of(model: nn.Module) -> Outcome:
    """Whether a model brings its plan, or has one that is derived; it cuts something."""
    tensors = lay_out(model, cg.plans.hf(model, batch=None), cg.whole, mesh(tp=2))
    assert any(tensor.layout is not None for tensor in tensors)
    return Outcome("brought" if plans._names_of(model) else "derived")


def served(model: nn.Module, wanted: Mapping[tuple[int, ...], list[int]], folder: Path) -> Outcome:
    """Whether the engine gives the tokens of `generate`.

    Where `generate` itself gives others without its cache, the engine must give those.
    """
    try:
        serve(model, wanted, folder / "model")
    except AssertionError:
        whole = generated_without_cache(model, wanted)
        if whole == wanted:
            raise
        serve(model, whole, folder / "again")
        reason = (
            "generate gives other tokens with its cache than without; the engine gives the latter"
        )
        return Outcome("plain fails", reason)
    return Outcome("equal")


def outcome_of(kind: str, shape: str, folder: Path) -> Outcome:
    """Run a type in a shape of `SHAPES`, or make its plan, save and reopen it, or serve it."""
    try:
        model = decoder(kind)
    except Exception as error:  # of transformers: whatever this model raises
        alone = kind not in BESIDE_ANOTHER
        return Outcome("not tried" if alone else "plain fails", f"no model: {_first_line(error)}")
    try:
        if shape == SERVED:
            wanted = generated(model)
        else:
            plain = train_plainly(model)
    except Exception as error:  # of transformers: whatever its run raises
        return Outcome("plain fails", f"{type(error).__name__}: {_first_line(error)}")
    try:
        if shape == PLAN:
            return plan_of(model)
        if shape == SERVED:
            return served(model, wanted, folder)
        if shape == SAVED:
            saved_and_reopened(kind, model, folder)
        else:
            SHAPES[shape](model, plain)
    except (cg.TraceError, ValueError) as error:
        return Outcome("refused", _first_line(error))
    except Exception as error:  # whatever is not right yet
        return Outcome("not yet", f"{type(error).__name__}: {_first_line(error)}")
    return Outcome("equal")


def _first_line(error: BaseException) -> str:
    """The first words of an error, without what differs from run to run."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = re.sub(r"/\S+/(\w+)", r"\1", line)
    line = re.sub(r"(decoderstage)\d+", r"\1", line)
    return line if len(line) <= 200 else line[:200].rpartition(" ")[0]
