"""Guard a trace: notice changes of the actor that the trace did not foresee.

Tracing bakes in what Python code reads: flags, sizes, which submodule comes next, and that an
attribute is not there. The guard compares exactly what was read, with the types of objects and
with the containers in which bodies look tensors up. It runs before every execution, so it compares
identities in C, and looks closer only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as modules

from ...errors import shorten
from ...values.actor_state import StateTensor
from ...values.heap.snapshot import MISSING
from ...values.interface import Guard, TracedCall
from .flat import FlatValues
from .guard_builder import GuardBuilder
from .nodes import Difference, GuardComparison, show_value
from .tensors_alike import check_of, never

_AGAIN = "trace the step again (lower and compile it anew) to use the actor as it is now"
_GLOBAL_HOOKS = {
    name: value
    for name, value in vars(modules).items()
    if name.startswith("_global_") and isinstance(value, dict)
}


def build_guard(
    call: TracedCall, reads: dict[int, set[str]], used: Sequence[StateTensor], who: str, method: str
) -> Guard | None:
    """A guard over the attributes `reads` (by object id) and the tensors `used`.

    Call it when the actor is as it was before the trace, with its own tensors.

    Args:
        call: the call that was traced.
        reads: names of the attributes that were read, by object id.
        used: the tensors that the trace has used.
        who: the actor's class, for messages.
        method: the actor's method, by name.

    Returns:
        The guard; None if the trace relied on nothing.
    """
    if not used and not any(reads.values()):
        return None
    reads[id(call.state.objects[0][0])].add(method)
    return _Guard(call, reads, used, who).check


class _Guard:
    """State of an actor on which a trace relied."""

    def __init__(
        self, call: TracedCall, reads: dict[int, set[str]], used: Sequence[StateTensor], who: str
    ) -> None:
        state = call.state
        builder = GuardBuilder(state.objects[0][0], reads, used)
        self._who = who
        self._used = {builder.number(t.tensor): t for t in used}
        self._hooked = {
            number for number, t in self._used.items() if t.tensor._post_accumulate_grad_hooks
        }
        roots = [*state.objects[:1], *call.argument_objects]
        self._roots = [(obj, path, builder.node(obj)) for obj, path in roots]
        if any(isinstance(obj, torch.nn.Module) for obj, _ in state.objects):
            hooks = ((hooks, name) for name, hooks in _GLOBAL_HOOKS.items())
            self._roots += [(value, name, builder.node(value)) for value, name in hooks]
        self._roots += builder.classes()
        self._flat = FlatValues()
        self._tensors: list[_Expected] = []
        self._places: list[tuple[Any, Any]] = []
        self._learned: list[int] = []
        self._alike: Callable[..., bool] = never
        self._ties: list[list[tuple[Any, Any]]] = []
        self._flatten()

    def _flatten(self) -> None:
        flat = FlatValues()
        for value, _, node in self._roots:
            node.flatten(value, flat)
        self._flat = flat
        self._tensors = [
            _expected(t, flat.tensors.get(n), n in self._hooked) for n, t in self._used.items()
        ]
        self._places = [(expected.holder, expected.key) for expected in self._tensors]
        self._learned = [i for i, expected in enumerate(self._tensors) if expected.kind[2]]
        self._alike = never
        self._ties = [places for places in flat.tensors.values() if len(places) > 1]

    def check(self) -> str | None:
        """Say what has changed; None if nothing has."""
        try:
            if not self._holds():
                return self._look_closer()
            tensors = [holder[key] for holder, key in self._places]
            if tensors and not self._alike(*tensors):
                change = self._explain_tensors()
                if change is None and all(x.layout is torch.strided for x in tensors):
                    self._alike = check_of(tensors, strides=True)
                return change
            for index in self._learned:
                tensor = tensors[index]
                is_hooked = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
                if is_hooked and self._tensors[index].is_hooked_anew(tensor):
                    return self._explain_tensors()
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            return self._look_closer()
        return None

    def _holds(self) -> bool:
        if not self._flat.holds():
            return False
        for places in self._ties:
            holder, key = places[0]
            first = holder[key]
            if any(holder[key] is not first for holder, key in places):
                return False
        return True

    def _look_closer(self) -> str | None:
        """Say what has changed. If only identities have, expect the new ones in later checks."""
        met = GuardComparison()
        for value, path, node in self._roots:
            try:
                difference = node.differ(value, path, met)
            except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
                return f"{self._who} has changed since it was traced; {_AGAIN}"
            if difference is not None:
                return self._explain(difference)
        self._flatten()
        return self._explain_tensors()

    def _explain(self, difference: Difference) -> str:
        if difference.after is MISSING:
            return f"{self._who} has lost the attribute '{difference.path}'; {_AGAIN}"
        if difference.before.startswith("one tensor with"):
            tied_path = difference.before.partition("'")[2].removesuffix("'")
            both = f"'{tied_path}' and '{difference.path}'"
            return f"{self._who}: {both} were one tensor when it was traced; {_AGAIN}"
        path = f"'{difference.path}'" if difference.path else "it"
        again = _AGAIN
        if difference.path.rpartition(".")[2] == "training":
            again = f"set it back by train() or eval(); or {_AGAIN}"
        before, after = shorten(difference.before), shorten(show_value(difference.after))
        if before == after:
            return f"{self._who}: {path} is another object now, {after} as before; {again}"
        return f"{self._who}: {path} was {before} when it was traced and is {after} now; {again}"

    def _explain_tensors(self) -> str | None:
        for expected in self._tensors:
            tensor = expected.holder[expected.key]
            if tensor.requires_grad and expected.is_hooked_anew(tensor):
                return (
                    f"{self._who}: '{expected.path}' has a gradient hook now, which a traced step "
                    f"does not call; {_AGAIN}"
                )
            if _kind(tensor) != expected.kind:
                return (
                    f"{self._who}: shape, dtype, layout or requires_grad of '{expected.path}' has "
                    f"changed since it was traced (now {tensor.dtype}, {tuple(tensor.shape)}, "
                    f"requires_grad={tensor.requires_grad}); {_AGAIN}"
                )
        return None


class _Expected(NamedTuple):
    """A tensor that a trace has used, `holder[key]`, and how messages name it.

    `is_hooked` says whether it had hooks of `register_post_accumulate_grad_hook` then.
    """

    holder: Any
    key: Any
    kind: tuple[torch.Size, torch.dtype, bool, bool]
    path: str
    is_hooked: bool

    def is_hooked_anew(self, tensor: torch.Tensor) -> bool:
        """True if a tensor has hooks that the trace does not call.

        Where the trace has met a hook behind the sum, a step calls those that are there when it
        runs.
        """
        if tensor._backward_hooks:
            return True
        return bool(tensor._post_accumulate_grad_hooks) and not self.is_hooked


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bool, bool]:
    """What a trace relies on: shape, dtype, `requires_grad`, and whether it is contiguous."""
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_contiguous()


def _expected(
    tensor: StateTensor, places: list[tuple[Any, Any]] | None, is_hooked: bool
) -> _Expected:
    holder, key = places[0] if places else _innermost(tensor)
    return _Expected(holder, key, _kind(tensor.tensor), tensor.path, is_hooked)


def _innermost(tensor: StateTensor) -> tuple[Any, Any]:
    slot = tensor.slots[0]
    holder, key = slot.holder, slot.key
    for index in slot.within:
        holder, key = holder[key], index
    return holder, key
