"""Notice at run time if state changes between a forward and its backward.

A backward looks parameters up where they live. A call of unknown effect in between, such as an
optimizer's step, may have changed them. The gradient would then belong to no forward that ever ran.
Eager PyTorch compares version counters for this, and so do the bodies here: the forward returns the
counters as one more saved value, and the backward compares them. Only derivatives with such a call
in between do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....ir.types import DType, TensorType
from ...values.actor_state import StateTensor
from ...values.interface import Body, TracedPart, TracedVjp, Write
from .bodies import wrapped


def with_versions(
    traced: TracedVjp, state: Sequence[StateTensor], at: int, what: str, between: Sequence[Write]
) -> TracedVjp:
    """A derivative that notices changes of `state` when it runs.

    Args:
        traced: the derivative.
        state: the tensors that its backward looks up.
        at: the number of values that it saves.
        what: the method, in words.
        between: the calls that may have changed the state.

    Returns:
        The derivative. Its backward raises a RuntimeError when it runs, if a tensor of the state
        has been replaced or written to since the forward.
    """
    # For each tensor its id and its version.
    type_ = TensorType(DType.I64, (len(state), 2))

    def noting(forward: Body) -> Body:
        def body(*inputs: Any) -> Sequence[Any]:
            return (*forward(*inputs), _versions(state))

        return body

    def checking(part: TracedPart, at: int) -> TracedPart:
        """The part with the versions as a further input, at index `at`, which it compares."""

        def wrap(backward: Body) -> Body:
            def body(*inputs: Any) -> Sequence[Any]:
                if not torch.equal(inputs[at], _versions(state)):
                    raise RuntimeError(_explain(inputs[at], state, what, between))
                return backward(*inputs[:at], *inputs[at + 1 :])

            return body

        function = part.declaration
        inputs = (*function.inputs[:at], type_, *function.inputs[at:])
        aliases = tuple((output, i + (i >= at)) for output, i in function.aliases)
        taking = replace(function, inputs=inputs, aliases=aliases)
        return TracedPart(taking, wrapped(part.only_body, wrap))

    vjp, first = traced.vjp, traced.first
    kept_before = tuple(i for i in vjp.kept if i < at)
    kept_after = tuple(i + 1 for i in vjp.kept if i >= at)
    places = {vjp.backward: at, vjp.input: at}
    outputs = (*first.declaration.outputs, type_)
    return replace(
        traced,
        vjp=replace(vjp, kept=(*kept_before, at, *kept_after) if vjp.weight is not None else ()),
        first=TracedPart(
            replace(first.declaration, outputs=outputs), wrapped(first.only_body, noting)
        ),
        second=checking(traced.second, at),
        halves=tuple(
            checking(h, places.get(h.declaration.name, len(kept_before))) for h in traced.halves
        ),
    )


def _versions(state: Sequence[StateTensor]) -> torch.Tensor:
    tensors = [tensor.slots[0].get() for tensor in state]
    return torch.tensor([(id(tensor), tensor._version) for tensor in tensors]).view(-1, 2)


def _explain(
    before: torch.Tensor, state: Sequence[StateTensor], method: str, between: Sequence[Write]
) -> str:
    same = (before == _versions(state)).all(dim=1)
    paths = [f"'{t.path}'" for t, is_same in zip(state, same.tolist(), strict=True) if not is_same]
    return f"{changed_between(method, paths, between)}; {CHANGE_AFTER}"


def changed_between(what: str, paths: Sequence[str], between: Sequence[Write]) -> str:
    """The message: the backward of `what` needs state that has changed since its forward."""
    calls = ", ".join(
        f"@{write.function}" + (f" ({write.loc})" if write.loc is not None else "")
        for write in between
    )
    return (
        f"the gradient of {what} needs {' and '.join(paths)} as its forward has seen it, but a "
        f"call between the two has changed it: {calls}"
    )


CHANGE_AFTER = "call cg.backward before what changes the actor, or call the method again after it"
"""The remedy."""
