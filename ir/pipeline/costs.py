"""The costs of the parts of a step, on paper: the input of simulations and of searches."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..attributes import Action
from ..text.files import read_text

PerStage: TypeAlias = float | tuple[float, ...]
"""A cost that all stages share, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message: `latency` milliseconds, and its bytes at `bandwidth` GB/s."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _check("latency", self.latency)
        _check_number("bandwidth", self.bandwidth)
        if not self.bandwidth > 0:
            raise ValueError(f"costs: bandwidth is {self.bandwidth} GB/s; it must be above 0")

    def time(self, nbytes: int) -> float:
        """Milliseconds of one message."""
        return self.latency + nbytes / (self.bandwidth * 1e6)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a microbatch holds on a stage: from F to B, while B runs, and from B to W."""

    before: float
    during: float
    after: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in milliseconds of tasks, calls and messages.

    B is the gradient of the inputs, W that of the weights; where a schedule does not split the
    backward, its B takes `tb + tw`. A transfer delays what needs it, and nothing else.

    Attributes:
        tf, tb, tw: time of F, B and W; one for all stages, or one for each.
        tcomm: time from the end of a task to the start of the next on another rank; for each
            stage, that between it and the next one, in both directions.
        tgather, treduce: time to gather the parameters of a bucket that ranks store in pieces, and
            to reduce its gradients; in an order of tasks, a stage is one bucket. They delay what
            needs them, and nothing else.
        mw: the memory that a microbatch holds between B and W, where it holds 1 between F and B.
        activation_bytes: the memory that a microbatch holds on a stage between F and B, in bytes;
            one for all stages, or one for each. Without it memory is counted in microbatches, to
            which each of the v stages of a rank adds 1/v.
        weight_bytes: the memory that a microbatch holds on a stage between B and W, in bytes,
            beside `activation_bytes`; without it, `mw` of that.
        mr: the share of the activations that a microbatch holds between F and B on a stage that
            recomputes, which is its inputs; one for all stages, or one for each. A search that may
            choose which stages recompute needs it.
        remat: the stages that recompute: B runs their forward again, so it takes `tf` longer, and
            they hold all of their activations while it runs.
        functions: time of each call of a function, by name. In a program these come before
            `tf`, `tb` and `tw`.
        overhead: time between a call of a program and what comes after it on its rank.
        post: time for which starting a send or a collective keeps its rank of a program busy.
        buffered: whether a message of a program leaves for its slot before the receive is posted,
            as through the shared memory of CPU ranks; collectives and channels that have a
            transport of their own wait for all ends in any case.
        link: what a message costs in a program; without it, `tcomm`, `tgather` and `treduce`.
        channels: the link of single channels, by id.
    """

    tf: PerStage = 1.0
    tb: PerStage = 1.0
    tw: PerStage = 1.0
    tcomm: PerStage = 0.0
    mw: float = 1.0
    activation_bytes: PerStage | None = None
    weight_bytes: PerStage | None = None
    mr: PerStage | None = None
    remat: tuple[int, ...] = ()
    tgather: float = 0.0
    treduce: float = 0.0
    functions: Mapping[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    post: float = 0.0
    buffered: bool = False
    link: Link | None = None
    channels: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tf", "tb", "tw", "tcomm", "activation_bytes", "weight_bytes", "mr"):
            value = getattr(self, name)
            for cost in value if isinstance(value, tuple) else () if value is None else (value,):
                _check(name, cost)
        for name, cost in self.functions.items():
            _check(f"functions['{name}']", cost)
        for name in ("tgather", "treduce", "mw", "overhead", "post"):
            _check(name, getattr(self, name))
        if not isinstance(self.buffered, bool):
            raise TypeError(f"costs: buffered is {self.buffered!r}; it must be true or false")
        for name, share in (("mw", self.mw), ("mr", self.mr)):
            most = max(share) if isinstance(share, tuple) else share
            if most is not None and most > 1:
                raise ValueError(f"costs: {name} is {most}; it is a share of 1")
        for stage in self.remat:
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise ValueError(f"costs: remat has {stage!r}; it is a tuple of numbers of stages")
        if self.weight_bytes is not None and self.activation_bytes is None:
            raise ValueError("costs: weight_bytes are given, and no activation_bytes")
        if self.remat and self.mr is None:
            raise ValueError("costs: stages that recompute need mr, the share that they hold")

    def of(self, action: Action, stage: int, split: bool) -> float:
        """Time of a task; `split` says whether W is a task of its own."""
        if action is Action.FORWARD:
            return _pick("tf", self.tf, stage)
        if action is Action.WEIGHT:
            return _pick("tw", self.tw, stage)
        together = 0.0 if split else _pick("tw", self.tw, stage)
        again = _pick("tf", self.tf, stage) if stage in self.remat else 0.0
        return _pick("tb", self.tb, stage) + together + again

    def between(self, stage: int) -> float:
        """Time of a transfer between `stage` and the next, if they are on different ranks."""
        return _pick("tcomm", self.tcomm, stage)

    def memory(self, stage: int, split: bool) -> Memory:
        """The memory that a microbatch holds on a stage.

        In bytes if `activation_bytes` is given, else as a share of the stage's activations.
        """
        value = 1.0 if self.activation_bytes is None else self.activation_bytes
        size = _pick("activation_bytes", value, stage)
        left = self.mw * size
        if self.weight_bytes is not None:
            left = _pick("weight_bytes", self.weight_bytes, stage)
        # Without a W of its own, one half of the backward still leaves it to the other.
        during, after = max(size, left), left if split else 0.0
        if stage in self.remat and self.mr is not None:
            return Memory(_pick("mr", self.mr, stage) * size, during, after)
        return Memory(size, during, after)

    def shared(self, stage_ranks: Sequence[int]) -> Costs:
        """The costs of each stage, where `tf`, `tb` and `tw` are those of all stages of a rank.

        What is given for each stage stays as it is.
        """
        counts = Counter(stage_ranks)
        shares: dict[str, PerStage] = {}
        for name in ("tf", "tb", "tw"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                shares[name] = tuple(value / counts[rank] for rank in stage_ranks)
        return replace(self, **shares)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The form that `from_json` reads; what has its default is left out."""
        return json.dumps(_plain(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str, file: str = "costs") -> Costs:
        """Read the form that `to_json` writes.

        Raises:
            ValueError: it is not of that form; the message names `file` and the key.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}: not JSON: {error}") from error
        try:
            return _read(data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Costs:
        """Read from a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a file of costs.
        """
        return Costs.from_json(read_text(path), str(path))


def _check(name: str, cost: float) -> None:
    _check_number(name, cost)
    if not math.isfinite(cost) or cost < 0:
        raise ValueError(f"costs: {name} is {cost}; it must be finite and not negative")


def _check_number(name: str, cost: float) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        raise TypeError(f"costs: {name} is {cost!r}; it must be a number")


def _pick(name: str, value: PerStage, stage: int) -> float:
    if not isinstance(value, tuple):
        return value
    if stage >= len(value):
        raise ValueError(
            f"costs: {name} is given for {len(value)} stages, and none of them is stage {stage} "
            "(the first is stage 0)"
        )
    return value[stage]


def _plain(costs: Costs) -> dict[str, Any]:
    """The fields that are not the default, as JSON has them."""
    data: dict[str, Any] = {}
    for item in fields(Costs):
        value = getattr(costs, item.name)
        if value != getattr(_DEFAULT, item.name):
            data[item.name] = value
    if "functions" in data:
        data["functions"] = dict(data["functions"])
    if "link" in data:
        data["link"] = _plain_link(data["link"])
    if "channels" in data:
        data["channels"] = {str(key): _plain_link(link) for key, link in data["channels"].items()}
    return data


def _plain_link(link: Link) -> dict[str, float]:
    plain = {"latency": link.latency}
    return plain if math.isinf(link.bandwidth) else plain | {"bandwidth": link.bandwidth}


def _read(data: Any) -> Costs:
    if not isinstance(data, dict):
        raise ValueError(f"costs are an object, not {type(data).__name__}")
    known = [item.name for item in fields(Costs)]
    for key in data:
        if key not in known:
            raise ValueError(f"there is no cost '{key}'; choose from {', '.join(known)}")
    read: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    if "functions" in read and not isinstance(read["functions"], dict):
        raise ValueError("functions are an object of milliseconds by name")
    if read.get("link") is not None:
        read["link"] = _read_link("link", read["link"])
    if "channels" in read:
        if not isinstance(read["channels"], dict):
            raise ValueError("channels are an object of links by id")
        for key in read["channels"]:
            if not key.isdecimal():
                raise ValueError(f"channels['{key}']: '{key}' is not the number of a channel")
        read["channels"] = {
            int(key): _read_link(f"channels['{key}']", link)
            for key, link in read["channels"].items()
        }
    return Costs(**read)


def _read_link(name: str, data: Any) -> Link:
    if not isinstance(data, dict) or data.keys() - {"latency", "bandwidth"}:
        raise ValueError(f"{name} is an object of latency (ms) and bandwidth (GB/s)")
    return Link(**data)


_DEFAULT = Costs()
