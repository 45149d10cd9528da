"""Order the work of a step by a pipeline schedule, and give each rank its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from ...ir.ops.module import Module
from ...ir.phases import Phase
from .. import schedules
from ..base import OptionError, Pass
from .merge import global_order
from .project import project
from .work import sort_work


@dataclass(frozen=True)
class SchedulePrograms(Pass):
    """Order all work once for all ranks, then give each rank its part of that order.

    The schedule gives the order in which each rank runs its tasks; all other ops follow their
    dependencies. A send comes right behind the op that makes its operand, a receive beside its
    send, and a wait just before the first use of its result. Sums over microbatches add their
    terms in the order in which they are computed. Types lose their places, and the
    messages of each channel are numbered anew.

    Before::

        program @step(%x: f32[2,8]@0) {
          %h = call(%x) {fn = @stage0.forward.fwd, mb = 0, task = 0F0} : f32[2,8]@0
          %h.send = send(%h) {chan = 0, mb = 0, peer = 1, seq = 0} : future<unit@0>
          %h.recv = recv() {chan = 0, mb = 0, peer = 0, seq = 0} : future<f32[2,8]@1>
          %h.at1 = wait(%h.recv) {mb = 0} : f32[2,8]@1
          %h.sent = wait(%h.send) {mb = 0} : unit@0
          %l = call(%h.at1) {fn = @stage1.loss, mb = 0, task = 1F0} : f32[]@1
          return(%l) {at = {1}}
        }

    After::

        program @0(%x: f32[2,8]) {
          %h = call(%x) {fn = @stage0.forward.fwd, mb = 0, task = 0F0} : f32[2,8]
          %h.send = send(%h) {chan = 0, mb = 0, peer = 1, seq = 0} : future<unit>
          %h.sent = wait(%h.send) {mb = 0} : unit
          return()
        }
        program @1() {
          %h.recv = recv() {chan = 0, mb = 0, peer = 0, seq = 0, task = 1F0} : future<f32[2,8]>
          %h.at1 = wait(%h.recv) {mb = 0, task = 1F0} : f32[2,8]
          %l = call(%h.at1) {fn = @stage1.loss, mb = 0, task = 1F0} : f32[]
          return(%l)
        }

    Attributes:
        schedule: the schedule; in the text of a pipeline, its name.
        prefetch: how many calls before its use a stored parameter is gathered, and how many calls
            behind its reduction a gradient is taken in.
        tasks_in_flight: how many tasks a rank may have begun that have not ended. With 2, the calls
            of the next task run while exchanges of a task travel: those of experts' rows, for
            instance. A rank then holds the activations of one more microbatch at most.
    """

    schedule: schedules.Schedule = field(default_factory=schedules.one_f_one_b)
    prefetch: int = 1
    tasks_in_flight: int = 1

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.ASYNC,)
    ensures: ClassVar[Phase | None] = Phase.SCHEDULED

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError(f"prefetch is at least 0, not {self.prefetch}")
        if self.tasks_in_flight < 1:
            raise ValueError(f"tasks_in_flight is at least 1, not {self.tasks_in_flight}")

    def run(self, module: Module) -> bool:
        work = sort_work(module)
        order = global_order(module, work, self.schedule, self.prefetch, self.tasks_in_flight)
        project(module, work, order)
        return True

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        others = {name: text for name, text in options.items() if name != "schedule"}
        pass_ = super().from_options(others)
        if "schedule" not in options:
            return pass_
        try:
            return replace(pass_, schedule=schedules.by_name(options["schedule"]))
        except ValueError as error:
            raise OptionError(str(error)) from error
