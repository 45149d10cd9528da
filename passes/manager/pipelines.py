"""The pipeline that `compile` runs, and why each pass stands where it does."""

from __future__ import annotations

from dataclasses import replace

from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.pipeline.costs import Costs
from ..base import Pass, Pipeline
from ..check.check_deadlock import CheckDeadlock
from ..check.check_races import CheckRaces
from ..check.check_types import CheckTypes
from ..frontend.cse import CommonSubexpressionElimination
from ..frontend.dce import DeadCodeElimination
from ..frontend.differentiate import Differentiate
from ..frontend.fsdp import Fsdp
from ..frontend.inline import Inline
from ..frontend.share_reads import ShareReads
from ..lower.assemble_in_place import AssembleInPlace
from ..lower.assign_streams import AssignStreams
from ..lower.batch_messages import BatchMessages
from ..lower.capture import Capture
from ..lower.fuse import Fuse
from ..lower.fuse_accumulation import FuseAccumulation
from ..lower.overlap import Overlap
from ..lower.plan_buffers import PlanBuffers
from ..lower.split_tails import SplitTails
from ..memory.offload import Offload
from ..memory.rest_state import RestState
from ..order.assign_stages import AssignStages
from ..order.schedule import SchedulePrograms
from ..placement.choose_dispatch import ChooseDispatch
from ..placement.choose_transports import ChooseTransports
from ..placement.fabrics import Fabrics
from ..placement.insert_transfers import InsertTransfers
from ..placement.lower_transfers import LowerTransfers
from ..placement.place import PlaceReplicated
from ..placement.split_transfers import SplitTransfers
from ..schedules import Schedule, one_f_one_b
from .manager import PassManager
from .registry import Switches, parse_switches


def default_pipeline(
    schedule: Schedule | None = None,
    switches: Switches | None = None,
    fabrics: Fabrics | None = None,
    in_flight: int = 0,
    fuse: str | None = None,
    fsdp: Fsdp | None = None,
    prefetch: int = 1,
    dispatch: str = "auto",
    tasks_in_flight: int = 1,
    offload: Offload | None = None,
) -> Pipeline:
    """The pipeline from a traced module to a checked program for each rank.

    Args:
        schedule: the order in which each rank runs its tasks; None: 1F1B.
        switches: the optional passes to leave out.
        fabrics: the transports that join the ranks' devices; None if no rank has a device.
        in_flight: in driven graphs, how many executions may be in flight; hosts then announce
            messages, and errors may take their place. 0 if all ranks run each step.
        fuse: the compiler that compiles the graphs of functions as a whole; None: none.
        fsdp: the pass that gathers stored parameters; None: it gathers them for each task.
        prefetch: as in `SchedulePrograms`.
        dispatch: as in `ChooseDispatch`.
        tasks_in_flight: as in `SchedulePrograms`.
        offload: the pass that moves tensors to hosts; None: it moves what `cg.offload` has marked.

    Raises:
        TypeError: `schedule` is not a `Schedule`.
        ValueError: there is no such `dispatch`, or `tasks_in_flight` is below 1.
    """
    schedule = schedule if schedule is not None else one_f_one_b()
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is {schedule!r}; it must be a cg.schedules.Schedule, as zb_h1(), "
            "by_name('zb-h1') and from_file('mine.txt') make one, or Schedule('mine', function)"
        )
    steps: list[Pass] = [
        # Stages are cut along the forward program as the user wrote it; derived calls get their
        # labels from the calls that they derive.
        AssignStages(),
        # Comes after the stages: all microbatches must still go through the same stages, even if
        # the results of only some are used.
        DeadCodeElimination(),
        # Comes before transfers are inserted, as cotangents travel, too.
        Differentiate(schedule.splits, "+".join(map(str, sorted(schedule.whole)))),
        # Gradients are those of whole functions; from here on their transfers are ops of the step.
        Inline(),
        # Calls of functions are calls of their parts now, some of which read the same each time.
        ShareReads(),
        # The gathers of stored parameters, and the reductions of their gradients, are ops now.
        # Parameters that are gathered once are one value from here on.
        Fsdp() if fsdp is None else fsdp,
        # The fewer values there are, the fewer travel.
        CommonSubexpressionElimination(),
        # Equal ops are merged by now, so it is known which ranks use each value.
        PlaceReplicated(),
        # Drops the functions that `differentiate` has replaced.
        DeadCodeElimination(),
        # Places are final, so a value that is used elsewhere has to travel.
        InsertTransfers(),
        # Transfers to experts gather all tokens, or exchange some; from here on no ids are read.
        ChooseDispatch(dispatch, "" if fabrics is None else fabrics.ranks),
        # Layouts are final, too: from here on ranks exchange plain tensors.
        LowerTransfers(),
        # A schedule can put other work between the start of a transfer and its end.
        SplitTransfers(),
        # Needs all communication as ops, to keep it in one order on all ranks.
        SchedulePrograms(schedule, prefetch, tasks_in_flight),
        # The order of calls is final, so it is known how long tensors rest.
        Offload() if offload is None else offload,
        # Copies of activations have been placed, so those of state go among them as they stand.
        RestState(prefetch=prefetch, costs=Costs() if offload is None else offload.costs),
        # One rank at a time from here on: hosts post receives early, and waits sink to first uses.
        Overlap(),
        # Receives stand where they are posted, and waits where their results are needed; between
        # them there is time to copy.
        AssembleInPlace(),
        # The order of ops is final, so it is known which values cross streams.
        AssignStreams(),
        # Needs the final waits: storage lives to its last use, waits for sends included.
        PlanBuffers(),
        # The functions are final: those that `differentiate` has replaced are gone.
        FuseAccumulation(),
        # The last passes check the programs that will run, and change nothing.
        CheckTypes(),
        CheckDeadlock(),
        # Relies on programs that come to their end: only these have an order.
        CheckRaces(),
    ]
    if fabrics is not None:
        steps = _for_devices(steps, fabrics, in_flight)
    if fuse is not None:
        steps.append(Fuse(fuse))
    return (switches if switches is not None else Switches()).apply(tuple(steps))


def _for_devices(steps: list[Pass], fabrics: Fabrics, in_flight: int) -> list[Pass]:
    """The steps with the passes that devices need.

    A channel has one transport, so transports are chosen before channels are made. Messages are put
    in order after receives of hosts have moved. Graphs only number the ops of checked programs;
    tails move some ops, so their programs are checked again.
    """
    passes: list[Pass] = []
    for step in steps:
        if isinstance(step, Offload | RestState):
            passes.append(replace(step, ranks=fabrics.ranks, driven=in_flight > 0))
        elif isinstance(step, AssembleInPlace):
            passes.append(AssembleInPlace(fabrics.ranks))
        elif isinstance(step, AssignStreams):
            order = BatchMessages(fabrics.rendezvous, batches=not in_flight)
            passes += order, AssignStreams(fabrics.rendezvous)
        else:
            passes.append(step)
        if isinstance(step, LowerTransfers):
            passes.append(ChooseTransports(fabrics.ranks, fabrics.reduces))
    passes.append(Capture(fabrics.ranks, in_flight > 0, fabrics.rendezvous))
    if in_flight > 1:
        # A tail runs beside the next execution, and only a program that is one graph has a tail.
        passes.append(SplitTails())
    return passes


def run_to(phase: Phase, module: Module) -> Module:
    """Make what a traced module becomes at a phase, with the defaults."""
    copy = clone(module)
    if copy.phase is phase:
        return copy
    # Nothing is known of devices here, so what rests on their hosts is left where it is.
    pipeline = default_pipeline(switches=parse_switches(f"-{Offload.name}"))
    reached = [index for index, p in enumerate(pipeline) if p.ensures is phase]
    PassManager(pipeline[: reached[0] + 1]).run(copy)
    return copy
