"""Measure what the calls and the messages of a compiled step cost, by running them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from ...backends.base import World
from ...ir.attributes import Action, Task
from ...ir.ops import Call, Collective, Op, Send, Wait
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs, Link
from ...ir.types import FutureType, tensor_bytes
from .link_benchmark import try_edge
from .message_latency import MessageLatency, message_latencies
from .recording import RecordedTimes


def measured_costs(world: World, module: Module, recordings: Sequence[RecordedTimes]) -> Costs:
    """The costs of a scheduled module, from recordings of it; collective.

    A cost that is measured several times is the mean. The times of a rank add up, and so do means,
    but not medians. Recordings that took unusually long or short are left out first.

    - A function costs the mean over its calls. F, B and W of a stage cost the mean over
      microbatches of the sum over their calls.
    - An overhead is the mean of the gaps between two calls of a rank with nothing to wait for.
    - A channel costs the time of messages that go back and forth between its ranks while nothing
      else happens. Messages of the step itself take longer, since ranks have other things to do:
      the mean of that is added.
    - A collective, and `link`, cost as much as the slowest edge.

    Args:
        world: all ranks.
        module: scheduled.
        recordings: of some of its executions, the same on all ranks.
    """
    recordings = _usual(recordings)
    calls = _calls(recordings)
    overhead, post = _overheads(module, recordings)
    channels = _links(world, module, overhead + post)
    if not world.is_virtual and world.device is None:
        seen = list(message_latencies(module, recordings, world.nodes))
        channels = _as_seen(channels, seen, overhead + post)
    tf, tb, tw = (_of_stages(module, calls, action) for action in Action)
    return Costs(
        tf=tf,
        tb=tb,
        tw=tw,
        tcomm=_between_stages(module, channels, len(tf), post),
        functions=_of_functions(calls),
        overhead=overhead,
        post=post,
        # In the virtual world a message moves only when both sides have come to it.
        buffered=not world.is_virtual,
        link=_slowest(channels.values()),
        channels=channels,
    )


# -- calls --------------------------------------------------------------------------------------


def _usual(recordings: Sequence[RecordedTimes]) -> list[RecordedTimes]:
    """The recordings without the fastest and the slowest quarter, by makespan."""
    out = len(recordings) // 4
    return sorted(recordings, key=lambda recording: recording.makespan)[out : len(recordings) - out]


def _calls(recordings: Sequence[RecordedTimes]) -> dict[Call, float]:
    """The mean time of each call, in milliseconds."""
    times: dict[Call, list[float]] = defaultdict(list)
    for recording in recordings:
        for span in recording.spans:
            if isinstance(span.op, Call):
                times[span.op].append(span.end - span.start)
    return {call: fmean(durations) for call, durations in times.items()}


def _of_functions(calls: Mapping[Call, float]) -> dict[str, float]:
    times: dict[str, list[float]] = defaultdict(list)
    for call, time in calls.items():
        times[call.fn.name].append(time)
    return {name: fmean(durations) for name, durations in sorted(times.items())}


def _of_stages(module: Module, calls: Mapping[Call, float], action: Action) -> tuple[float, ...]:
    """The mean time of each stage's tasks of one action; 0 for a stage without such tasks."""
    times: dict[Task, float] = defaultdict(float)
    count = 1
    for call, time in calls.items():
        if call.task is not None and module.functions[call.fn.name].actor is not None:
            count = max(count, call.task.stage + 1)
            if call.task.action is action:
                times[call.task] += time
    of_stages: list[list[float]] = [[] for _ in range(count)]
    for task, time in times.items():
        of_stages[task.stage].append(time)
    return tuple(fmean(durations) if durations else 0.0 for durations in of_stages)


def _overheads(module: Module, recordings: Sequence[RecordedTimes]) -> tuple[float, float]:
    """The overhead of a call, and that of starting a message, in milliseconds."""
    gaps: dict[Op, list[float]] = defaultdict(list)
    followers = _followers(module)
    for recording in recordings:
        for span, following in pairwise(recording.spans):
            if span.op in followers and followers[span.op][0] is following.op:
                gaps[span.op].append(following.start - span.end)
    times = [(fmean(op_gaps), followers[op][1]) for op, op_gaps in gaps.items()]
    without = [gap for gap, posts in times if not posts]
    overhead = fmean(without) if without else 0.0
    starting = [(gap - overhead) / posts for gap, posts in times if posts]
    return overhead, max(0.0, fmean(starting)) if starting else 0.0


def _followers(module: Module) -> dict[Op, tuple[Op, int]]:
    """The call that follows each call on its rank, and the number of messages started in between.

    Calls are left out if the rank may wait for a message before the next call.
    """
    followers: dict[Op, tuple[Op, int]] = {}
    for program in module.programs:
        last: Op | None = None
        posts = 0
        for op in program.ops:
            if isinstance(op, Wait) and isinstance(op.operands[0].type, FutureType):
                last = None
            elif isinstance(op, Send | Collective):
                posts += 1
            elif isinstance(op, Call):
                if last is not None:
                    followers[last] = (op, posts)
                last, posts = op, 0
    return followers


# -- messages -----------------------------------------------------------------------------------


def _links(world: World, module: Module, overhead: float) -> dict[int, Link]:
    """Measure the link of each channel. Every edge is measured once, in both directions.

    Args:
        overhead: milliseconds of the sender, to subtract from the time between two calls.
    """
    edges: dict[tuple[int, int], Link] = {}
    channel_links: dict[int, Link] = {}
    sizes = _largest_messages(module)
    for channel in module.channels.values():
        links = []
        for rank, peer in pairwise(channel.ranks):
            edge = (min(rank, peer), max(rank, peer))
            if edge not in edges:
                edges[edge] = try_edge(world, edge, sizes.get(edge, 0), overhead)
            links.append(edges[edge])
        link = _slowest(links)
        if link is not None:
            channel_links[channel.id] = link
    return channel_links


def _as_seen(
    links: Mapping[int, Link], seen: Sequence[MessageLatency], before: float
) -> dict[int, Link]:
    """Correct the latency of links, so that they are right on average for messages of the step.

    Args:
        links: by channel.
        seen: the latencies of messages that a rank has waited for.
        before: milliseconds that a sender spends before the message leaves.
    """
    more = [message.time - before - _message_time(message.op, links) for message in seen]
    if not more:
        return dict(links)
    extra = fmean(more)
    return {
        chan: Link(max(0.0, link.latency + extra), link.bandwidth) for chan, link in links.items()
    }


def _message_time(op: Send, links: Mapping[int, Link]) -> float:
    """The time of a message over the link of its channel."""
    return links[op.chan].time(tensor_bytes(op.operands[0].type))


def _slowest(links: Iterable[Link]) -> Link | None:
    """The link that takes longest for a megabyte; None without links."""
    return max(links, key=lambda link: link.time(1 << 20), default=None)


def _largest_messages(module: Module) -> dict[tuple[int, int], int]:
    """The bytes of the largest tensor on each edge; an edge names its lower rank first."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Send):
                rank = program.rank or 0
                edge = (min(rank, op.peer), max(rank, op.peer))
                sizes[edge] = max(sizes[edge], tensor_bytes(op.operands[0].type))
    return sizes


def _between_stages(
    module: Module, links: Mapping[int, Link], stages: int, post: float
) -> tuple[float, ...]:
    """The mean time of messages between each stage and the next, in both directions."""
    times: list[list[float]] = [[] for _ in range(stages)]
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Send) and op.task is not None and op.chan in links:
                forward = op.task.action is Action.FORWARD
                before = op.task.stage if forward else op.task.stage - 1
                if before >= 0:
                    times[before].append(post + _message_time(op, links))
    return tuple(fmean(durations) if durations else 0.0 for durations in times)
