"""Calls of methods whose actor has state at rest in the memory of the host."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.ops.host_state import HostState
from ...ir.types import Mesh
from ..errors import TraceError
from ..values.actor_state import ActorState
from ..values.group import Group, GroupActor
from ..values.interface import Bodies, Guard, MethodTarget, RankBodies, Target, TracedCall
from ..values.operators import storage_key
from ..values.optimizer_state import RestingState
from ..values.plan import ShardingPlan


def parameters_at_rest(target: Target) -> Mapping[int, RestingState]:
    """The state of each rank's actor, if parameters that a method reads rest on the host."""
    if not isinstance(target, MethodTarget):
        return {}
    return {rank: state for rank, state in target.resting.items() if state.paths}


def single_rank(target: Target, values: int) -> Group:
    """The rank of an actor as a group, for a call with so many values.

    So its methods are cut as those of a mesh are.
    """
    assert isinstance(target, MethodTarget), "only actors have what rests"
    (rank,) = target.resting
    mesh = Mesh.of_grid((rank,), (("rank", 1),))
    actor = GroupActor(target.actor, mesh, ShardingPlan(), {}, {rank: target.instance})
    return actor.group((None,) * values)


def note_used_on(target: Target, call: TracedCall, state: ActorState) -> None:
    """Note for each tensor that rests on the host the device where it is used.

    Raises:
        TraceError: another actor holds a parameter that rests, or an optimizer whose state does; or
            as `RestingState.prepare` does.
    """
    if not isinstance(target, MethodTarget):
        return
    _prepared(target, call)
    for resting in parameters_at_rest(target).values():
        for tensor in state.tensors:
            if tensor.path in resting.paths:
                tensor.used_on = resting.device


def brought_to_rest(target: Target, guard: Guard | None) -> Guard | None:
    """A guard that first brings parameters to rest which somebody has put elsewhere."""
    states = tuple(parameters_at_rest(target).values())
    if not states:
        return guard

    def check() -> str | None:
        for state in states:
            state.come_to_rest()
        return None if guard is None else guard()

    return check


def resting_bytes(target: Target, call: TracedCall) -> int:
    """The bytes of state that rests on the host and that an opaque call finds on the device.

    Raises:
        TraceError: as in `note_used_on`.
    """
    return _prepared(target, call) if isinstance(target, MethodTarget) else 0


def _prepared(target: MethodTarget, call: TracedCall) -> int:
    """Let the state of an actor rest; the bytes that an opaque call finds on the device."""
    for state in target.resting.values():
        _refuse_shared(target, call, state)
    return max((state.prepare() for state in target.resting.values()), default=0)


def _refuse_shared(target: MethodTarget, call: TracedCall, state: RestingState) -> None:
    """Refuse state that another actor holds, too, and would find on the host."""
    for other in target.shared:
        held = ["this optimizer" for own in state.current_optimizers() if other.has(own)]
        held += [
            f"'{path}'"
            for path, parameter in state.current_parameters().items()
            if storage_key(parameter) in other.memory
        ]
        if held:
            raise TraceError(
                f"state of {target.actor} rests on the host, and {other.other} holds {held[0]}, "
                "too",
                loc=call.loc,
                remedy='let one actor hold it, or leave store="host" out',
            )


def resting_guard(target: Target) -> Guard | None:
    """The guard of an opaque call: as much state rests on the host as when it was traced."""
    states = tuple(target.resting.values()) if isinstance(target, MethodTarget) else ()
    sizes = [state.size for state in states]

    def check() -> str | None:
        if [state.size for state in states] == sizes:
            return None
        return f"{target.name}: other state than then has come to rest on the host"

    return check if states else None


def host_state_of(target: Target) -> dict[str, Bodies]:
    """The bodies that hand over an actor's state on the host, by the names of their functions."""
    assert isinstance(target, MethodTarget), "actors have state"
    states, names = target.resting, HostState.of(target.actor)
    return {
        names.rest: RankBodies.of({rank: state.rest for rank, state in states.items()}),
        names.enter: RankBodies.of({rank: state.enter for rank, state in states.items()}),
        names.leave: RankBodies.of({rank: state.leave for rank, state in states.items()}),
        names.settle: RankBodies.of({rank: state.settle for rank, state in states.items()}),
    }
