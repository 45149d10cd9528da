"""The options and positions of optimizers and LR schedulers: all that is no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...tracer.record.actors.actors import ActorHandle
from ...tracer.values.actor_state import collect
from ...tracer.values.optimizer_state import optimizers_of
from ..world.world import world
from .together import together


@dataclass(frozen=True)
class TrainerState:
    """The options of an actor's optimizers, and the states of its schedulers.

    Attributes:
        groups: of each optimizer the options of its groups of parameters.
        schedulers: what each scheduler's `state_dict` returns.
    """

    groups: tuple[tuple[dict[str, Any], ...], ...] = ()
    schedulers: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The state for JSON, as `of_json` takes it."""
        return {"optimizers": self.groups, "schedulers": self.schedulers}

    @staticmethod
    def of_json(content: Any) -> TrainerState:
        """The state that was written.

        Raises:
            KeyError, TypeError: it is no such state.
        """
        groups = tuple(
            tuple(map(dict, optimizer_groups)) for optimizer_groups in content["optimizers"]
        )
        return TrainerState(groups, tuple(map(dict, content["schedulers"])))


def trainers_of(actors: Sequence[ActorHandle]) -> TrainerState:
    """The state that the trainers of all actors have in common. Collective.

    Raises:
        ValueError: they differ, or hold something that JSON has no form for.
    """
    own_texts = together(lambda: _by_text(actors), "save its optimizers")
    actor_names = {
        text: name
        for rank_texts in world().allgather(own_texts)
        for text, name in rank_texts.items()
    }
    if len(actor_names) > 1:
        one, other, *_ = actor_names.values()
        raise ValueError(
            f"the optimizers or schedulers of {one} and {other} have other options or positions; "
            "those of all parts of a model are saved as one: give them equal ones"
        )
    return next((TrainerState.of_json(json.loads(text)) for text in actor_names), TrainerState())


def _by_text(actors: Sequence[ActorHandle]) -> dict[str, str]:
    """The trainers of this process's actors as JSON, each with the name of an actor."""
    names: dict[str, str] = {}
    for name, instance in _instances(actors):
        state = _state(instance)
        if state == TrainerState():
            continue
        try:
            names.setdefault(json.dumps(state.as_json()), name)
        except TypeError as error:
            raise ValueError(f"{name} has an optimizer or scheduler with {error}") from error
    return names


def check_trainers(actors: Sequence[ActorHandle], saved: TrainerState) -> None:
    """Compare the numbers of trainers and groups with those that were saved.

    Raises:
        ValueError: they differ.
    """
    for name, instance in _instances(actors):
        current = _state(instance)
        counts = [len(groups) for groups in current.groups], len(current.schedulers)
        saved_counts = [len(groups) for groups in saved.groups], len(saved.schedulers)
        if current != TrainerState() and counts != saved_counts:
            raise ValueError(
                f"{name} has optimizers with {counts[0]} groups of parameters and {counts[1]} "
                f"schedulers; in the checkpoint they are {saved_counts[0]} and {saved_counts[1]}"
            )


def put_trainers(actors: Sequence[ActorHandle], saved: TrainerState) -> None:
    """Give optimizers and schedulers their saved options and states."""
    for _, instance in _instances(actors):
        optimizers, schedulers = _trainers(instance)
        for optimizer, groups in zip(optimizers, saved.groups, strict=False):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update({k: _like(group.get(k), v) for k, v in options.items()})
        for scheduler, state in zip(schedulers, saved.schedulers, strict=False):
            scheduler.load_state_dict(state)


def _like(current: Any, value: Any) -> Any:
    return tuple(value) if isinstance(current, tuple) else value


def _instances(actors: Sequence[ActorHandle]) -> Iterator[tuple[str, object]]:
    for actor in actors:
        for instance in actor.instances.values():
            yield actor.name, instance


def _trainers(instance: object) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
    state = collect(instance)
    schedulers = [trainer for trainer in state.trainers if isinstance(trainer, LRScheduler)]
    return optimizers_of(state), schedulers


def _state(instance: object) -> TrainerState:
    optimizers, schedulers = _trainers(instance)
    return TrainerState(
        tuple(
            tuple(
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            )
            for optimizer in optimizers
        ),
        tuple(scheduler.state_dict() for scheduler in schedulers),
    )
