"""The costs of tasks, calls and messages, for simulations and for searches of orders."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..attributes import Action
from ..flops import WORK_OF_COPIED_BYTE, WORK_OF_MILLISECOND
from ..text.files import read_text

PerStage: TypeAlias = float | tuple[float, ...]
"""A cost that all stages share, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message: `latency` in milliseconds, then its bytes at `bandwidth` in GB/s."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _check("latency", self.latency)
        _check_number("bandwidth", self.bandwidth)
        if not self.bandwidth > 0:
            raise ValueError(f"costs: bandwidth is {self.bandwidth} GB/s; it must be above 0")

    def time(self, nbytes: int) -> float:
        """The time of a message of `nbytes` bytes, in milliseconds."""
        return self.latency + nbytes / (self.bandwidth * 1e6)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a microbatch holds on a stage, in bytes or as a share of activations.

    Attributes:
        before: between F and B.
        during: while B runs.
        after: between B and W.
    """

    before: float
    during: float
    after: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The times of tasks, calls and messages in milliseconds, and the memory of tasks.

    B is the gradient of the inputs, and W that of the weights. If a schedule does not split the
    backward, its B takes `tb + tw`. A transfer delays only the tasks that need it.

    Attributes:
        tf, tb, tw: the time of F, B and W; one for all stages, or one for each.
        tcomm: the time from the end of a task to the start of the next on another rank. If given
            for each stage, it is the time between that stage and the next, in both directions.
        tgather, treduce: the time to gather the stored parameters of a bucket, and to reduce its
            gradients. In an order of tasks, each stage is one bucket. They delay only the tasks
            that need them.
        mw: the memory that a microbatch holds between B and W, as a share of what it holds between
            F and B.
        activation_bytes: the bytes that a microbatch holds on a stage between F and B; one number
            for all stages, or one for each. Without it memory is counted in microbatches, and each
            of the v stages of a rank counts 1/v.
        weight_bytes: the bytes that a microbatch holds on a stage between B and W; only together
            with `activation_bytes`. Without it they are `mw` times `activation_bytes`.
        mr: the share of its activations that a microbatch holds between F and B on a stage that
            recomputes, namely the stage's inputs; one for all stages, or one for each. A search
            that chooses the stages that recompute needs it.
        remat: the stages that recompute. Their B runs the forward again: it takes `tf` longer, and
            they hold all of their activations while it runs.
        functions: the time of each call of a function, by name. In a program these override `tf`,
            `tb` and `tw`.
        overhead: the time between a call of a program and the next op of its rank.
        post: the time for which a rank is busy when it starts a send, a collective or a copy to or
            from its host.
        buffered: whether a message of a program leaves for its slot before the receive is posted,
            as through the shared memory of CPU ranks. Collectives, and channels with a transport of
            their own, wait for all ends in any case.
        link: the cost of a message in a program; without it, `tcomm`, `tgather` and `treduce`.
        channels: the links of single channels, by id; they override `link`.
        host: the link between a device and its host, for each direction. The default is PCI Express
            5.0 with 16 lanes, as it is measured.
        speed: the floating-point operations of a millisecond, by which a choice of memory estimates
            what is not measured. With it a copy to the host or back also occupies its device, since
            both use the device's memory. Without it a choice takes the device's (`DeviceSpeed`),
            and copies delay only what waits for them.
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
    host: Link = field(default_factory=lambda: Link(0.01, 50.0))
    speed: float | None = None

    def __post_init__(self) -> None:
        for name in ("tf", "tb", "tw", "tcomm", "activation_bytes", "weight_bytes", "mr"):
            value = getattr(self, name)
            for cost in value if isinstance(value, tuple) else () if value is None else (value,):
                _check(name, cost)
        for name, cost in self.functions.items():
            _check(f"functions['{name}']", cost)
        for name in ("tgather", "treduce", "mw", "overhead", "post"):
            _check(name, getattr(self, name))
        if self.speed is not None:
            _check("speed", self.speed)
            if not self.speed > 0:
                raise ValueError(f"costs: speed is {self.speed}; it must be above 0")
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

    def estimate(self, work: float) -> float:
        """The milliseconds of an amount of work that is not measured, in operations."""
        return work / (WORK_OF_MILLISECOND if self.speed is None else self.speed)

    def copy_load(self, nbytes: int) -> float:
        """The milliseconds for which a copy to the host, or back, occupies its device."""
        return self.post + (self.estimate(WORK_OF_COPIED_BYTE * nbytes) if self.speed else 0.0)

    def of(self, action: Action, stage: int, split: bool) -> float:
        """The time of a task, in milliseconds; `split` says whether W is a task of its own."""
        if action is Action.FORWARD:
            return _pick("tf", self.tf, stage)
        if action is Action.WEIGHT:
            return _pick("tw", self.tw, stage)
        together = 0.0 if split else _pick("tw", self.tw, stage)
        again = _pick("tf", self.tf, stage) if stage in self.remat else 0.0
        return _pick("tb", self.tb, stage) + together + again

    def between(self, stage: int) -> float:
        """The time of a transfer between `stage` and the next, if their ranks differ."""
        return _pick("tcomm", self.tcomm, stage)

    def memory(self, stage: int, split: bool) -> Memory:
        """The memory that a microbatch holds on a stage.

        It is in bytes if `activation_bytes` is given, and else a share of the stage's activations.
        """
        value = 1.0 if self.activation_bytes is None else self.activation_bytes
        size = _pick("activation_bytes", value, stage)
        left = self.mw * size
        if self.weight_bytes is not None:
            left = _pick("weight_bytes", self.weight_bytes, stage)
        # Even without W as a task, the first half of the backward holds this for the second.
        during, after = max(size, left), left if split else 0.0
        if stage in self.remat and self.mr is not None:
            return Memory(_pick("mr", self.mr, stage) * size, during, after)
        return Memory(size, during, after)

    def shared(self, stage_ranks: Sequence[int]) -> Costs:
        """Divide `tf`, `tb` and `tw`, given for all stages of a rank together, among its stages.

        Times that are given for each stage stay.
        """
        counts = Counter(stage_ranks)
        shares: dict[str, PerStage] = {}
        for name in ("tf", "tb", "tw"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                shares[name] = tuple(value / counts[rank] for rank in stage_ranks)
        return replace(self, **shares)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The JSON text that `from_json` reads; fields at their defaults are left out."""
        return json.dumps(_plain(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str, file: str = "costs") -> Costs:
        """Read the JSON text that `to_json` writes.

        Raises:
            ValueError: the text has another form; the message names `file` and the key.
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
            OSError: the file cannot be read.
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
    """The fields that differ from their defaults, as values for JSON."""
    data: dict[str, Any] = {}
    for item in fields(Costs):
        value = getattr(costs, item.name)
        if value != getattr(_DEFAULT, item.name):
            data[item.name] = value
    if "functions" in data:
        data["functions"] = dict(data["functions"])
    for name in {"link", "host"} & data.keys():
        data[name] = _plain_link(data[name])
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
    for name in ("link", "host"):
        if read.get(name) is not None:
            read[name] = _read_link(name, read[name])
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
