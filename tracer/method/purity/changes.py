"""Judge what a traced call did to attributes: a rebound buffer is kept, the rest is suspicious.

`self.ema = 0.9 * self.ema + 0.1 * x` gives an attribute a new tensor. That becomes an output of the
graph which the body writes back. Any other change would happen once, while tracing. It is refused,
unless it stores no traced value and a second run after it makes no more changes (`twice.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....ir.location import Location
from ...errors import TraceError
from ...values.actor_state import ActorState, StateAttribute, StateTensor
from ...values.heap.reach import has_fake, reaches_tensor
from ...values.heap.snapshot import StateChange, show
from ...values.heap.unkept import UnkeptTensor
from ...values.interface import TracedCall
from ...values.operators import storage_key
from .watch import AttributeWatch

_ATTRIBUTE_REMEDY = (
    "mark the method with @cg.opaque; or keep what changes in a buffer (self.register_buffer), "
    "which a traced method may update"
)
_WARM_UP = (
    ". If it is made once and kept, call the method once eagerly, on actor.local, before the step "
    "is traced"
)


@dataclass(frozen=True, eq=False)
class Rebind:
    """A slot of the state in which the call puts a new tensor.

    Attributes:
        tensor: the state tensor that was there.
        slot: the slot.
        value: the new tensor, a fake.
        shared: whether its memory is also that of an input, an output or other state.
    """

    tensor: StateTensor
    slot: StateAttribute
    value: torch.Tensor
    shared: bool


@dataclass(frozen=True, eq=False)
class Initialization:
    """A change that perhaps only the first call makes, such as of an attribute made when needed.

    Attributes:
        owner: the `id` of the object whose attribute has changed; None inside of a container.
        change: the change, which is undone after the trace.
        refusal: makes the error to raise if other calls make the change, too. It is a function,
            since a `TraceError` counts as raised once it is made (`errors.py`).
    """

    owner: int | None
    change: StateChange
    refusal: Callable[[], TraceError]


def sort_changes(
    changes: Iterable[StateChange],
    call: TracedCall,
    fakes: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    watch: AttributeWatch,
) -> tuple[list[Rebind], list[Initialization]]:
    """Sort the changes of a call: rebound tensors, and changes that perhaps only the first makes.

    Args:
        changes: what has changed in the actor's containers.
        call: the call.
        fakes: the fake of each state tensor.
        outputs, inputs: the fakes that the call returns and takes.
        watch: knows the lines of writes.

    Raises:
        TraceError: there is a change that a graph cannot make.
    """
    judge = _Judge(call, fakes, watch)
    judged = [judge.judge(change) for change in changes]
    rebinds = [outcome for outcome in judged if isinstance(outcome, Rebind)]
    judge.refuse_ties(rebinds)
    taken = [storage_key(t) for t in (*outputs, *inputs, *fakes)]
    new = [storage_key(r.value) for r in rebinds]
    outcome = [
        Rebind(r.tensor, r.slot, r.value, shared=key in taken or new.count(key) > 1)
        for r, key in zip(rebinds, new, strict=True)
    ]
    return outcome, [outcome for outcome in judged if isinstance(outcome, Initialization)]


class _Judge:
    def __init__(
        self, call: TracedCall, fakes: Sequence[torch.Tensor], watch: AttributeWatch
    ) -> None:
        self.call = call
        self.watch = watch
        self.state = {id(f): t for f, t in zip(fakes, call.state.tensors, strict=True)}

    def judge(self, change: StateChange) -> Rebind | Initialization | None:
        """Judge a change; None if it is left out of the graph."""
        tensor = self.state.get(id(change.before))
        if tensor is None and isinstance(change.after, torch.Tensor):
            if isinstance(change.before, UnkeptTensor):
                return None
            if self._is_librarys(change):
                unkept = replace(change, after=UnkeptTensor(change.path))
                return self._initialization(unkept, self._refusal(change))
        if tensor is None and not reaches_tensor(change.after, self._known()):
            return self._initialization(change, self._refusal(change))
        if tensor is None or not isinstance(change.after, torch.Tensor) or change.key is None:
            raise self._refusal(change)()
        if isinstance(tensor.tensor, torch.nn.Parameter):
            raise self._error(
                change,
                f"it replaces the parameter '{change.path}'",
                "copy into it under torch.no_grad() (p.copy_(...)), or mark the method with "
                "@cg.opaque",
            )
        old, new = change.before, change.after
        if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            raise self._error(
                change,
                f"it replaces the tensor '{change.path}' ({show(old)}) by one of another kind "
                f"({show(new)})",
                "shapes are static in a step: keep a buffer of full size and write into it, or "
                "mark the method with @cg.opaque",
            )
        if new.requires_grad:
            raise self._error(
                change,
                f"it stores a tensor with gradient history in '{change.path}'",
                "store x.detach(); history that outlives the call cannot be kept"
                + self._normed(change),
            )
        for slot in tensor.slots:
            if slot.holder is change.holder and slot.key == change.key:
                return Rebind(tensor, slot, new, shared=False)
        raise self._refusal(change)()

    def _is_librarys(self, change: StateChange) -> bool:
        """True for an attribute without a tensor to which a library has written."""
        owner = _owners(self.call.state).get(id(change.holder))
        is_written = owner is not None and (owner, str(change.key)) in self.watch.by_library
        return is_written and not reaches_tensor(change.before, set())

    def _known(self) -> set[int]:
        """The actor's own objects, which hold fakes while it is traced."""
        state = self.call.state
        return {id(value) for value, _ in (*state.objects, *state.containers)}

    def _initialization(
        self, change: StateChange, refusal: Callable[[], TraceError]
    ) -> Initialization:
        owner = _owners(self.call.state).get(id(change.holder))
        return Initialization(None if change.key is None else owner, change, refusal)

    def _normed(self, change: StateChange) -> str:
        """Return what to do about `torch.nn.utils.weight_norm`, if it is behind a change."""
        owner = _owners(self.call.state).get(id(change.holder))
        obj = next((obj for obj, _ in self.call.state.objects if id(obj) == owner), None)
        if not isinstance(obj, torch.nn.Module):
            return ""
        names = {type(hook).__name__ for hook in obj._forward_pre_hooks.values()}
        if names.isdisjoint({"WeightNorm", "SpectralNorm"}):
            return ""
        return (
            ". It is torch.nn.utils.weight_norm or spectral_norm that does so: use those of "
            "torch.nn.utils.parametrizations"
        )

    def refuse_ties(self, rebinds: Sequence[Rebind]) -> None:
        """Refuse a rebound tensor that shares its memory with other state.

        In eager Python, a later write to one of them would be seen in the other.

        Raises:
            TraceError: there is such a tensor.
        """
        if not rebinds:
            return
        now = [(storage_key(t.slots[0].get()), t) for t in self.call.state.tensors]
        many = Counter(key for key, _ in now)
        for rebind in rebinds:
            key = storage_key(rebind.value)
            if key is not None and many[key] > 1:
                path = rebind.slot.path
                tied_tensor = next(t for k, t in now if k == key and t is not rebind.tensor)
                raise self.call.refusal(
                    f"it lets '{path}' share its memory with '{tied_tensor.path}', so that a write "
                    "to one would change the other",
                    f"assign a copy, made by .clone(), to '{path}'",
                    self._line(rebind.slot.holder, rebind.slot.key),
                )

    def _refusal(self, change: StateChange) -> Callable[[], TraceError]:
        remedy = _ATTRIBUTE_REMEDY
        if has_fake(change.after):
            remedy = (
                f"return the value, for the step to hand on; {remedy}; or put back what was there, "
                f"before the method returns, if later calls do not need it{_WARM_UP}"
            )
            reason = (
                f"it stores a traced value in the attribute '{change.path}', which holds "
                f"{show(change.before)} now"
            )
        else:
            reason = (
                f"it changes the attribute '{change.path}' ({change.words()}); a "
                "traced method runs once, so the change would be lost"
            )
        return partial(self._error, change, reason, remedy)

    def _error(self, change: StateChange, reason: str, remedy: str) -> TraceError:
        return self.call.refusal(reason, remedy, self._line(change.holder, change.key))

    def _line(self, container: Any, key: Any) -> Location | None:
        """The line of the last write to an attribute."""
        owner = _owners(self.call.state).get(id(container))
        return self.watch.writes.get((owner, str(key))) if owner is not None else None


def _owners(state: ActorState) -> dict[int, int]:
    """For each dict that holds attributes, the object that they belong to, by ids.

    Looking at these dicts counts as a read of all attributes, so it waits until a change needs it.
    """
    owners: dict[int, int] = {}
    for obj, _ in state.objects:
        attributes = vars(obj) if hasattr(obj, "__dict__") else {}
        owners[id(attributes)] = id(obj)
        if isinstance(obj, torch.nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                owners[id(attributes[name])] = id(obj)
    return owners
