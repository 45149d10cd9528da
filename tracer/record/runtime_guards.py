"""Check in every execution what opaque methods do, for which there is no trace to look at.

What a trace relies on is compared before each execution. A call of an opaque method may change it
after that, so traced methods that follow one, of the same actor or of one that shares state with
it, compare it again. And in plain Python, a write to a tensor that a method was given is seen by
others who use that tensor: not so in a compiled step, which may have sent it elsewhere.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.ops import Call
from ...ir.ops.module import FunctionKind
from ...ir.types import TensorType
from ..graph.codegen.bodies import wrapped
from ..values.interface import Body, Guard
from ..values.specs import show_type
from .session.session import Session


def recheck(session: Session) -> None:
    """Let the functions of a recorded step that follow an opaque call check what they rely on."""
    functions, vjps = session.module.functions, session.module.vjps
    shaken: set[str] = set()
    checked: set[str] = set()
    for op in session.module.program.ops:
        if not isinstance(op, Call):
            continue
        function = functions[op.fn.name]
        actor = function.actor
        if actor is None:
            continue
        if function.kind is FunctionKind.OPAQUE:
            shaken.update((actor, *(sharing_actor for sharing_actor, _ in function.shares.effects)))
            continue
        guard = session.guards.get(function.name)
        if guard is None or actor not in shaken:
            continue
        names = [function.name, *([vjps[op.vjp.name].forward] if op.vjp is not None else [])]
        for name in names:
            if name in session.bodies and name not in checked:
                checked.add(name)
                session.bodies[name] = wrapped(session.bodies[name], _checking(guard))


def watch_arguments(session: Session) -> None:
    """Let opaque functions check that they leave tensors alone which others use as well."""
    program = session.module.program
    uses = Counter(value for op in program.ops for value in set(op.operands))
    uses.update(program.params)  # the caller holds them
    watched: dict[str, set[int]] = {}
    for op in program.ops:
        if not isinstance(op, Call) or op.fn.name not in session.bodies:
            continue
        if session.module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            for index, value in enumerate(op.operands):
                if isinstance(value.type, TensorType) and uses[value] > 1:
                    watched.setdefault(op.fn.name, set()).add(index)
    for name, indices in watched.items():
        leaving = functools.partial(_leaving, indices=tuple(sorted(indices)), name=name)
        session.bodies[name] = wrapped(session.bodies[name], leaving)


def _leaving(body: Body, indices: Sequence[int], name: str) -> Body:
    """The body, which raises a RuntimeError where it writes to one of these inputs.

    Versions tell, except of what goes past them, such as a write to `x.data` or `x.numpy()`. So the
    first executions compare copies.
    """
    comparisons_left = itertools.chain(range(_COMPARED, 0, -1), itertools.repeat(0))

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        look = _version if next(comparisons_left) == 0 else _copy
        before = [look(inputs[index]) for index in indices]
        results = body(*inputs)
        for index, version in zip(indices, before, strict=True):
            tensor = inputs[index]
            if not _same(version, look(tensor)):
                raise RuntimeError(
                    f"the opaque method @{name} has written to a tensor that it was given, "
                    f"{show_type(tensor.dtype, tensor.shape)}, and which others use as well: they "
                    "may have a copy of it. Write to x.clone(), and return it"
                )
        return results

    return run


_COMPARED = 2
"""So many executions compare what tensors hold."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same(before: int | torch.Tensor, after: int | torch.Tensor) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return torch.equal(before, after)
    return bool(before == after)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _checking(guard: Guard) -> Callable[[Body], Body]:
    """Let a body raise a RuntimeError where the guard is broken when it is called."""

    def wrap(body: Body) -> Body:
        def run(*inputs: Any) -> Sequence[Any]:
            change = guard()
            if change is not None:
                raise RuntimeError(
                    f"{change.partition(';')[0]}: an opaque method has changed it in this "
                    "execution. Mark the method that reads it @cg.opaque as well, or keep what "
                    "changes in a buffer"
                )
            return body(*inputs)

        return run

    return wrap
