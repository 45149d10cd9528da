"""The pipeline that `compile` runs, and why each pass stands where it does."""

from __future__ import annotations

from ..base import Pass, Pipeline
from ..check.check_deadlock import CheckDeadlock
from ..check.check_races import CheckRaces
from ..check.check_types import CheckTypes
from ..frontend.cse import CommonSubexpressionElimination
from ..frontend.dce import DeadCodeElimination
from ..frontend.differentiate import Differentiate
from ..frontend.fsdp import Fsdp
from ..frontend.inline import Inline
from ..lower.assemble_in_place import AssembleInPlace
from ..lower.assign_streams import AssignStreams
from ..lower.batch_messages import BatchMessages
from ..lower.capture import Capture
from ..lower.fuse import Fuse
from ..lower.fuse_accumulation import FuseAccumulation
from ..lower.overlap import Overlap
from ..lower.plan_buffers import PlanBuffers
from ..lower.split_tails import SplitTails
from ..order.assign_stages import AssignStages
from ..order.schedule import SchedulePrograms
from ..placement.choose_transports import ChooseTransports
from ..placement.fabrics import Fabrics
from ..placement.insert_transfers import InsertTransfers
from ..placement.lower_transfers import LowerTransfers
from ..placement.place import PlaceReplicated
from ..placement.split_transfers import SplitTransfers
from ..schedules import Schedule, one_f_one_b
from .registry import Switches


def default_pipeline(
    schedule: Schedule | None = None,
    switches: Switches | None = None,
    fabrics: Fabrics | None = None,
    in_flight: int = 0,
    fuse: str | None = None,
    fsdp: Fsdp | None = None,
    prefetch: int = 1,
) -> Pipeline:
    """From a traced module to one checked program for each rank.

    Args:
        schedule: in which order each rank runs its tasks; 1F1B if there is none.
        switches: optional passes to leave out.
        fabrics: what joins the ranks' devices; None where no rank has any.
        in_flight: executions that may be in flight, where one rank starts them; hosts then announce
            messages, and errors may take their place. 0 where all ranks run each step.
        fuse: what compiles the graphs of functions as a whole; None if nothing does.
        fsdp: how stored parameters are gathered; None: for each task.
        prefetch: as in `SchedulePrograms`.

    Raises:
        TypeError: `schedule` is something else.
    """
    schedule = schedule if schedule is not None else one_f_one_b()
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is {schedule!r}; it must be a cg.schedules.Schedule, as zb_h1(), "
            "by_name('zb-h1') and from_file('mine.txt') make one, or Schedule('mine', function)"
        )
    steps: list[Pass] = [
        # Stages are cut along the forward program, as it was written; what is derived from a
        # call is labelled after it.
        AssignStages(),
        # After the stages: a result may be used of some microbatches alone, which still all go
        # through the same stages.
        DeadCodeElimination(),
        # Gradients come before any value is brought anywhere: cotangents travel, too.
        Differentiate(schedule.splits),
        # Gradients are those of whole functions; the transfers inside of them are ops from here on.
        Inline(),
        # Gathers of stored parameters, and reductions of their gradients, are in sight; what is
        # gathered once is one value from here on.
        Fsdp() if fsdp is None else fsdp,
        # The fewer values there are, the fewer travel.
        CommonSubexpressionElimination(),
        # Equal work is one by now, so what is wanted of it is known.
        PlaceReplicated(),
        # Drops the functions that `differentiate` has replaced.
        DeadCodeElimination(),
        # Places are final: what is used where it is not has to travel.
        InsertTransfers(),
        # Layouts are final, too: from here on ranks exchange plain tensors.
        LowerTransfers(),
        # A schedule can put other work between the start of a transfer and its end.
        SplitTransfers(),
        # Needs all communication in sight, to keep it in one order on all ranks.
        SchedulePrograms(schedule, prefetch),
        # One rank at a time from here on: hosts post receives early, and waits sink to first uses.
        Overlap(),
        # Receives are where they are posted, and waits where they are needed: between them there is
        # time to copy.
        AssembleInPlace(),
        # Where ops stand is final, so what crosses streams is known.
        AssignStreams(),
        # Storage lives from where it is made to its last use, waits for sends included.
        PlanBuffers(),
        # The functions are final: those that `differentiate` has replaced are gone.
        FuseAccumulation(),
        # The rest proves things about the programs that will run, and changes nothing.
        CheckTypes(),
        CheckDeadlock(),
        # Programs that come to their end have an order, which the proof rests on.
        CheckRaces(),
    ]
    if fabrics is not None:
        steps = _for_devices(steps, fabrics, in_flight)
    if fuse is not None:
        steps.append(Fuse(fuse))
    return (switches if switches is not None else Switches()).apply(tuple(steps))


def _for_devices(steps: list[Pass], fabrics: Fabrics, in_flight: int) -> list[Pass]:
    """The steps, and those that devices need besides.

    Channels are made for one transport each, so it is chosen before there are any. Messages are put
    in order once receives of hosts have moved. Graphs only number the ops of
    programs, which stay as they have been proved; tails move some, and are proved again.
    """
    passes: list[Pass] = []
    for step in steps:
        if isinstance(step, AssembleInPlace):
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
        # The next execution is there to be run beside it; and only what is whole has a tail.
        passes.append(SplitTails())
    return passes
