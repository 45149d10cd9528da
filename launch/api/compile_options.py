"""The options of a compilation, checked once and passed on as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Literal

from ...backends.driven.timeouts import seconds
from ...backends.fusion.fuse import check_name
from ...ir.pipeline.costs import Costs, Link
from ...ir.pipeline.device_speed import DeviceSpeed
from ...ir.text.stored_plan import StoredPlan
from ...passes.base import Pipeline
from ...passes.manager.pipelines import default_pipeline
from ...passes.manager.registry import Switches, parse_switches
from ...passes.memory.memory_limit import MemoryLimit
from ...passes.memory.offload import Offload
from ...passes.memory.saving_levels import HostMemory
from ...passes.placement.choose_dispatch import DISPATCHES, Dispatch
from ...passes.placement.fabrics import Fabrics
from ...passes.schedules import Schedule
from ...passes.simulate.residency import Residency
from ..environment.config import Config, config
from .select_schedule import costs_of

SAVED_TYPES = (None, "bf16")
"""The types in which forwards may save tensors; None: each in its own."""

_MAY_DIFFER = frozenset({"dump", "timeout", "settings", "plan"})
"""The fields that need not be equal on all ranks, or are, since ranks have compared the plan."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options of `Lowered.compile`, which explains them, beside the environment's settings.

    Fields hold what the user has given, and properties what that means in this environment.

    Attributes:
        max_inflight: None if all ranks run the step together, so that it needs no driver.
        plan: takes the place of all passes; None: they run.
        tasks_in_flight: a number; or the costs by which one is chosen; `auto` if these are not yet
            measured.
        settings: of the environment, at the time of the compilation.

    Raises:
        TypeError: an option is of another type.
        ValueError: `timeout` is no time, `check_inputs` or `tasks_in_flight` is less than 1,
            `memory` is no number of bytes, or there is no such `fuse`, `dispatch` or `saved`.
    """

    schedule: Schedule | None = None
    passes: str = ""
    dump: Path | str | None = None
    seed: int | None = None
    timeout: float | None = None
    max_inflight: int | None = None
    fuse: str | None = None
    fsdp: Residency | None = None
    check_inputs: bool | int | None = None
    dispatch: Dispatch = "auto"
    plan: StoredPlan | None = None
    memory: str | int | Sequence[str | int] | None = None
    costs: Costs | None = None
    host_link: Link | None = None
    saved: str | None = None
    tasks_in_flight: int | Costs | Literal["auto"] = 1
    settings: Config = field(default_factory=config)

    def __post_init__(self) -> None:
        if not isinstance(self.passes, str):
            raise TypeError(f"passes={self.passes!r}: a string that names some, as '-overlap,-cse'")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, Integral)
        ):
            raise TypeError(f"seed={self.seed!r}: an int, or None for that of CG_SEED")
        if self.fsdp is not None and not isinstance(self.fsdp, Residency):
            raise TypeError(f"fsdp={self.fsdp!r}: what cg.fsdp(...) returns, or None")
        if self.timeout is not None:
            limit = seconds(self.timeout)
            if limit is not None and limit <= 0:
                raise ValueError(
                    f"timeout={self.timeout!r}: seconds, more than 0; None for CG_TIMEOUT"
                )
        if self.fuse is not None:
            check_name(self.fuse)
        _check_interval(self.check_inputs)
        if self.memory is not None:
            MemoryLimit.of(self.memory)
        if self.costs is not None and not isinstance(self.costs, Costs):
            raise TypeError(f"costs={self.costs!r}: what cg.measure returns, a cg.Costs, or None")
        if self.host_link is not None and not isinstance(self.host_link, Link):
            raise TypeError(f"host_link={self.host_link!r}: a cg.Link(latency, bandwidth), or None")
        if self.saved not in SAVED_TYPES:
            raise ValueError(
                f"saved={self.saved!r}: None, to save tensors as they are, or 'bf16', to round them"
            )
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch={self.dispatch!r}: it is {', '.join(DISPATCHES)}")
        _check_tasks(self.tasks_in_flight)

    @property
    def switches(self) -> Switches:
        """The passes that are left out: by CG_PASSES, then by `passes`.

        Raises:
            UnknownPassError, OptionError: as in `parse_switches`.
        """
        return parse_switches(self.settings.passes).then(parse_switches(self.passes))

    @property
    def chosen_seed(self) -> int:
        """The seed of the step's random numbers."""
        return int(self.settings.seed if self.seed is None else self.seed)

    @property
    def call_timeout(self) -> float | None:
        """The seconds that a call on all ranks may take; None: any number."""
        return self.settings.timeout if self.timeout is None else self.timeout

    @property
    def execute_timeout(self) -> float | None:
        """The seconds that `execute` waits for an execution in flight to end; None: any number."""
        return self.settings.given_timeout if self.timeout is None else self.timeout

    @property
    def tasks_at_first(self) -> int:
        """The tasks that a rank has in flight before their number is chosen."""
        return self.tasks_in_flight if isinstance(self.tasks_in_flight, int) else 1

    @property
    def in_flight(self) -> int:
        """The most executions that are in flight; 0 where nothing drives the step."""
        return self.max_inflight or 0

    @property
    def memory_limit(self) -> MemoryLimit | None:
        """The limit of what programs hold; None: there is none."""
        return None if self.memory is None else MemoryLimit.of(self.memory)

    def host_costs(self, fabrics: Fabrics | None) -> Costs:
        """What a choice of memory goes by: times of functions, speed of devices, and their links.

        Times are those that are given, or that a search knows. Speed and link are those of the
        devices, unless they are given.

        Args:
            fabrics: of the ranks' devices; None if there are none.
        """
        known = self.costs or costs_of(self.schedule) or Costs()
        device = DeviceSpeed() if fabrics is None else fabrics.speed
        speed = device.work if known.speed is None else known.speed
        link = known.host if known.host != Costs().host else device.host
        link = link if self.host_link is None else self.host_link
        return Costs(functions=known.functions, host=link, speed=speed)

    def pipeline_of(self, fabrics: Fabrics | None, is_driven: bool) -> Callable[..., Pipeline]:
        """The passes for a schedule.

        Args:
            fabrics: what joins devices; None if there are none.
            is_driven: whether one rank starts executions.
        """
        return partial(
            default_pipeline,
            switches=self.switches,
            fabrics=fabrics,
            in_flight=self.in_flight if is_driven else 0,
            fuse=self.fuse,
            prefetch=1 if self.fsdp is None else self.fsdp.prefetch,
            dispatch=self.dispatch,
            tasks_in_flight=self.tasks_at_first,
            offload=Offload(costs=self.host_costs(fabrics)),
        )

    def hosts(self, fabrics: Fabrics | None, is_driven: bool) -> HostMemory:
        """The memory of hosts that tensors may move to; none in a step that one rank drives."""
        costs = self.host_costs(fabrics)
        if fabrics is None or is_driven or Offload.name in self.switches.off:
            return HostMemory(costs=costs)
        count = len(fabrics.ranks.split("+"))
        ranks = frozenset(rank for rank in range(count) if fabrics.of_rank(rank) is not None)
        return HostMemory(ranks, costs)

    @property
    def compared_every(self) -> int | None:
        """Compare the arguments of every n-th execution; 0: of none; None: of some."""
        return None if self.check_inputs is None else int(self.check_inputs)

    def agreed(self) -> dict[str, object]:
        """The options that must be equal on all ranks, by name."""
        options = {name: value for name, value in vars(self).items() if name not in _MAY_DIFFER}
        link = self.host_costs(None).host
        return options | {
            "passes": ",".join(filter(None, (self.settings.passes, self.passes))),
            "seed": self.chosen_seed,
            "fsdp": None if self.fsdp is None else self.fsdp.text,
            "check_inputs": self.compared_every,
            "memory": None if self.memory_limit is None else self.memory_limit.bytes,
            "host_link": (link.latency, link.bandwidth),
        }


def _check_tasks(tasks: object) -> None:
    """Return if this can be `tasks_in_flight` of `compile`.

    Raises:
        TypeError: it is no number, no costs and not `auto`.
        ValueError: it is less than 1.
    """
    if isinstance(tasks, Costs) or tasks == "auto":
        return
    if isinstance(tasks, bool) or not isinstance(tasks, int):
        raise TypeError(
            f"tasks_in_flight={tasks!r}: how many tasks of a rank, an int; or 'auto', or cg.Costs "
            "to choose by"
        )
    if tasks < 1:
        raise ValueError(f"tasks_in_flight={tasks}: at least 1, one task after the other")


def _check_interval(check_inputs: object) -> None:
    """Return if this can be `check_inputs` of `compile`.

    Raises:
        TypeError: it is no bool, int or None.
        ValueError: it is less than 1.
    """
    if check_inputs is None or isinstance(check_inputs, bool):
        return
    if not isinstance(check_inputs, int):
        raise TypeError(
            f"check_inputs={check_inputs!r}: True or False, an int n to compare the arguments of "
            "every n-th execution, or None for the first few and some of the later ones"
        )
    if check_inputs < 1:
        raise ValueError(
            f"check_inputs={check_inputs}: compare the arguments of every n-th execution, with n "
            "at least 1; False compares none"
        )
