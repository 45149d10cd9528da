"""Judging what a traced call did to attributes: a rebound buffer is kept, the rest is refused.

`self.ema = 0.9 * self.ema + 0.1 * x` gives an attribute a new tensor. That becomes an output of the
graph which the body writes back. Any other change would happen once, while tracing, and be lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..ir.location import Location
from .call import Call
from .errors import TraceError
from .fingerprint import MISSING, Change, Snapshot
from .guards import storage_key
from .lifting import ActorState, Slot, StateTensor
from .watch import Watch

_ATTRIBUTE_REMEDY = (
    "mark the method with @cg.opaque; or keep what changes in a buffer (self.register_buffer), "
    "which a traced method may update"
)


@dataclass(frozen=True, eq=False)
class Rebind:
    """A slot of the state that the call gives a new tensor.

    Attributes:
        tensor: the state tensor that was there.
        slot: where.
        value: the new tensor, a fake.
        shared: whether its memory is also that of an input, an output or other state.
    """

    tensor: StateTensor
    slot: Slot
    value: torch.Tensor
    shared: bool


def sort_changes(
    changes: Iterable[Change],
    call: Call,
    fakes: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    watch: Watch,
) -> list[Rebind]:
    """The rebound tensors among the changes of a call.

    Args:
        fakes: the fake of each state tensor.

    Raises:
        TraceError: there is a change that a graph cannot make.
    """
    judge = _Judge(call, fakes, watch)
    rebinds = [judge.judge(change) for change in changes]
    taken = [storage_key(t) for t in (*outputs, *inputs, *fakes)]
    new = [storage_key(r.value) for r in rebinds]
    return [
        Rebind(r.tensor, r.slot, r.value, shared=key in taken or new.count(key) > 1)
        for r, key in zip(rebinds, new, strict=True)
    ]


class _Judge:
    def __init__(self, call: Call, fakes: Sequence[torch.Tensor], watch: Watch) -> None:
        self.call = call
        self.watch = watch
        self.state = {id(f): t for f, t in zip(fakes, call.state.tensors, strict=True)}

    def judge(self, change: Change) -> Rebind:
        tensor = self.state.get(id(change.before))
        if tensor is None or not isinstance(change.after, torch.Tensor) or change.key is None:
            raise self._refuse(change)
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
                f"it replaces the tensor '{change.path}' ({_words(old)}) by one of another kind "
                f"({_words(new)})",
                "shapes are static in a step: keep a buffer of full size and write into it, or "
                "mark the method with @cg.opaque",
            )
        if new.requires_grad:
            raise self._error(
                change,
                f"it stores a tensor with gradient history in '{change.path}'",
                "store x.detach(); history that outlives the call cannot be kept",
            )
        for other in tensor.slots:
            if other.holder is change.container and other.key == change.key:
                return Rebind(tensor, other, new, shared=False)
        raise self._refuse(change)

    def _refuse(self, change: Change) -> TraceError:
        if _has_fake(change.after):
            reason = (
                f"it stores a traced value in the attribute '{change.path}', which holds "
                f"{_words(change.before)} now"
            )
        else:
            reason = (
                f"it changes the attribute '{change.path}' (from {_words(change.before)} to "
                f"{_words(change.after)}); a traced method runs once, so the change would be lost"
            )
        return self._error(change, reason, _ATTRIBUTE_REMEDY)

    def _error(self, change: Change, reason: str, remedy: str) -> TraceError:
        owner = _owners(self.call.state).get(id(change.container))
        loc = self.watch.writes.get((owner, str(change.key))) if owner is not None else None
        return TraceError(
            f"{self.call.what} cannot be traced: {reason}",
            loc=loc or self.call.blame,
            remedy=remedy,
        )


def _owners(state: ActorState) -> dict[int, int]:
    """For the dicts that hold attributes: the object whose attributes they hold, by ids."""
    found: dict[int, int] = {}
    for obj, _ in state.objects:
        attributes = vars(obj) if hasattr(obj, "__dict__") else {}
        found[id(attributes)] = id(obj)
        if isinstance(obj, torch.nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                found[id(attributes[name])] = id(obj)
    return found


def _words(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, (list, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _has_fake(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return isinstance(value, FakeTensor)
    return any(isinstance(item, FakeTensor) for item in value)


_FEW = 1000


class Leaks:
    """Finds traced values that a function has left in its module's globals or its closure."""

    def __init__(self, function: Callable[..., Any]) -> None:
        function = inspect.unwrap(getattr(function, "__func__", function))
        self._cells = dict(
            zip(
                getattr(getattr(function, "__code__", None), "co_freevars", ()),
                getattr(function, "__closure__", None) or (),
                strict=True,
            )
        )
        self._cell_values = {name: _content(cell) for name, cell in self._cells.items()}
        space: dict[str, Any] = getattr(function, "__globals__", {})
        named = {**space, **self._cell_values}
        holders = [(v, n) for n, v in named.items() if _is_holder(v)]
        self._snapshot = Snapshot([(space, ""), *holders])
        self._found: list[Change] = []
        self._found_cells: list[str] = []

    def check(self, what: str, loc: Location | None) -> None:
        """Look for leaks.

        Raises:
            TraceError: there is one.
        """
        self._search()
        names = [c.path for c in self._found] + self._found_cells
        if names:
            raise TraceError(
                f"{what} cannot be traced: it stores a traced value outside the actor, in "
                f"'{names[0]}'",
                loc=loc,
                remedy="return the value, keep it in a buffer of the actor, or mark the method "
                "with @cg.opaque",
            )

    def _search(self) -> None:
        self._found = [c for c in self._snapshot.changes() if _has_fake(c.after)]
        self._found_cells = [n for n, cell in self._cells.items() if _has_fake(_content(cell))]

    def undo(self) -> None:
        """Take out every traced value that was left."""
        self._search()
        for change in self._found:
            _put_back(change)
        for name in self._found_cells:
            self._cells[name].cell_contents = self._cell_values[name]


def _put_back(change: Change) -> None:
    if change.key is None:
        kept = [item for item in change.container if not isinstance(item, FakeTensor)]
        change.container.clear()
        (change.container.update if isinstance(change.container, set) else change.container.extend)(
            kept
        )
    elif change.before is MISSING:
        del change.container[change.key]
    else:
        change.container[change.key] = change.before


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _is_holder(value: Any) -> bool:
    return isinstance(value, (list, dict, set)) and len(value) <= _FEW
