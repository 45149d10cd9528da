"""The choices of routers of mixtures of experts: counts, losses of balance, and corrections.

All figures are of the whole batch, however many ranks share it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import cg

Figures = dict[str, Tensor]
"""Figures of a stage in a microbatch, by name; none if it has no experts.

`counts` int64 [layers, experts] has the choices of each expert, and `dropped` int64 [layers] those
that no expert takes. `chosen` and `shares` float32 [experts] are sums over tokens and layers, those
of earlier stages included: of choices, and of the softmax of routers. `squares` float32 [] is the
sum of squares of their logsumexp, and `rows` float32 [] the number of tokens times layers.
"""


@dataclass(frozen=True)
class Balance:
    """The options that keep experts busy.

    Attributes:
        capacity: of each expert, as `cg.expert_capacity` takes it; None: they take all.
        auxiliary: the coefficient of the auxiliary loss.
        z: the coefficient of the z-loss.
        correction: the step by which biases of routers are corrected.
    """

    capacity: float | None
    auxiliary: float
    z: float
    correction: float

    @property
    def has_losses(self) -> bool:
        return bool(self.auxiliary or self.z)

    def figures(self, choices: Any, before: Figures) -> Figures:
        """The figures of a stage.

        Args:
            choices: what `cg.expert_choices` has noted.
            before: the figures of the stage before.
        """
        own: Figures = {}
        if choices.ids:
            own = {"counts": choices.counts(), "dropped": choices.dropped()}
        if not self.has_losses:
            return own
        if len(choices.logits) != len(choices.ids):
            raise ValueError(
                "transformers names no logits of this model's routers: leave out --auxiliary-loss "
                "and --z-loss"
            )
        sums = {name: before[name] for name in _SUMS if name in before}
        for ids, count, logits in zip(choices.ids, choices.experts, choices.logits, strict=True):
            logits = logits.float()
            layer = {
                "chosen": (ids.unsqueeze(-1) == torch.arange(count, device=ids.device)).sum((0, 1)),
                "shares": logits.softmax(-1).sum(0),
                "squares": logits.logsumexp(-1).square().sum(),
                "rows": torch.full((), len(ids), device=ids.device),
            }
            sums = {name: sums[name] + v if name in sums else v for name, v in layer.items()}
        return own | sums

    def loss(self, figures: Figures) -> Tensor:
        """The losses of balance of a batch, from figures of the last stage.

        The auxiliary loss is that of transformers (`load_balancing_loss_func`), of the Switch
        Transformer (https://arxiv.org/abs/2101.03961), and the z-loss that of ST-MoE
        (https://arxiv.org/abs/2202.08906), a mean over tokens and layers.
        """
        rows = figures["rows"]
        shares = (figures["chosen"] / rows) * (figures["shares"] / rows)
        auxiliary = shares.sum() * len(figures["shares"])
        return self.auxiliary * auxiliary + self.z * figures["squares"] / rows

    def correct(self, part: nn.Module, counts: Tensor | None) -> None:
        """Move the biases of a part's routers towards experts that were chosen less than others.

        As in DeepSeek V3 (https://arxiv.org/abs/2412.19437, section 2.1.2).

        Args:
            counts: of the whole step, int64 [layers, experts]; None: the part has no experts.
        """
        if not self.correction or counts is None:
            return
        for bias, row in zip(corrections(part), counts.float(), strict=True):
            bias += self.correction * (row.mean() - row).sign()


def balance(model: Any, args: argparse.Namespace) -> Balance:
    """The options for a model, and else what its configuration says, as transformers reads it.

    Parts of a model know of their own layers alone, so the model computes no auxiliary loss itself.

    Raises:
        SystemExit: an option is for experts or their routers, and the model has none such.
    """
    auxiliary, config = args.auxiliary_loss, vars(model.config)
    if auxiliary is None:
        is_on = config.get("output_router_logits", False)
        auxiliary = config.get("router_aux_loss_coef", 0.0) if is_on else 0.0
    if "output_router_logits" in config:
        model.config.output_router_logits = False
    chosen = Balance(args.capacity, auxiliary, args.z_loss, args.correction)
    if chosen != Balance(None, 0.0, 0.0, 0.0) and not layers(model):
        raise SystemExit(
            f"{type(model).__name__} has no mixtures of experts in the form of transformers: "
            "leave out --capacity, --auxiliary-loss, --z-loss and --correction"
        )
    if chosen.correction and next(corrections(model), None) is None:
        raise SystemExit(
            f"the routers of {type(model).__name__} have no biases that --correction moves: leave "
            "it out"
        )
    return chosen


def layers(model: nn.Module) -> tuple[str, ...]:
    """The paths of a model's mixtures of experts, of the form that cg knows."""
    with cg.expert_choices(model) as choices:
        return choices.layers


_SUMS = ("chosen", "shares", "squares", "rows")


def corrections(model: nn.Module) -> Iterator[Tensor]:
    """The biases by which routers choose, and which no gradient trains, in order of layers."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield buffer


def add_up(figures: Sequence[Figures]) -> Figures:
    """Counts of a stage in a step, from its figures in all microbatches."""
    names = [name for name in ("counts", "dropped") if name in figures[0]]
    return {name: sum(microbatch[name] for microbatch in figures) for name in names}


@dataclass
class Summary:
    """The choices of routers in a run so far; it goes into checkpoints.

    Attributes:
        counts: of each layer the choices of each expert, in all steps.
        last: the same, in the last step.
        dropped: of each step, the choices that no expert took, in all layers.
        busiest: of each step, the most choices of an expert, in units of its layer's mean.
    """

    counts: list[list[int]]
    last: list[list[int]]
    dropped: list[int]
    busiest: list[float]

    @staticmethod
    def empty() -> Summary:
        return Summary([], [], [], [])

    def add(self, figures: Sequence[Figures]) -> None:
        """Note the figures of all stages of a step."""
        rows = [row.tolist() for stage in figures for row in stage.get("counts", ())]
        if not rows:
            return
        self.last = rows
        before = self.counts or [[0] * len(row) for row in rows]
        self.counts = [
            [sum(pair) for pair in zip(*pairs, strict=True)]
            for pairs in zip(before, rows, strict=True)
        ]
        self.dropped.append(sum(int(stage["dropped"].sum()) for stage in figures if stage))
        self.busiest.append(max(max(row) * len(row) / sum(row) for row in rows))

    def words(self) -> str:
        """For the progress bar: the busiest expert, and what is dropped."""
        if not self.last:
            return ""
        return f", busiest expert {self.busiest[-1]:.1f}x, {self.dropped[-1]} choices dropped"
