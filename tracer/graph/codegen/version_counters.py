"""Notice at run time if state changes between a forward and its backward.

A backward looks parameters up where they live. A call of unknown effect in between, such as an
optimizer's step, may have changed them. The gradient would then belong to no forward that ever ran.
Eager PyTorch compares version counters for this, and so do the bodies here: the forward returns the
counters as one more saved value, and the backward compares them. Only derivatives with such a call
in between do this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ....ir.types import DType, TensorType
from ...values.actor_state import StateTensor
from ...values.interface import Bodies, Body, RankBodies, TracedPart, TracedVjp, Write
from .bodies import GraphBody, wrapped_body

StateNow: TypeAlias = Callable[[], list[torch.Tensor]]
"""Gives the tensors that the backward of an instance looks up."""


def with_versions(
    traced: TracedVjp, state: Sequence[StateTensor], at: int, shown: str, between: Sequence[Write]
) -> TracedVjp:
    """A derivative that notices changes of `state` when it runs.

    Args:
        traced: the derivative.
        state: the tensors that its backward looks up.
        at: the number of values that it saves.
        shown: the method, in words.
        between: the calls that may have changed the state.

    Returns:
        The derivative. Its backward raises a RuntimeError when it runs, if a tensor of the state
        has been replaced or written to since the forward.
    """
    # For each tensor its id and its version.
    type_ = TensorType(DType.I64, (len(state), 2))

    def noting(forward: Body, now: StateNow) -> Body:
        def body(*inputs: Any) -> Sequence[Any]:
            return (*forward(*inputs), _versions(now))

        return body

    def checking(part: TracedPart, at: int) -> TracedPart:
        """The part with the versions as a further input, at index `at`, which it compares."""

        def wrap(backward: Body, now: StateNow) -> Body:
            def body(*inputs: Any) -> Sequence[Any]:
                if not torch.equal(inputs[at], versions := _versions(now)):
                    same = (inputs[at] == versions).all(dim=1).tolist()
                    pairs = zip(state, same, strict=True)
                    paths = [f"'{tensor.path}'" for tensor, is_same in pairs if not is_same]
                    raise RuntimeError(f"{changed_between(shown, paths, between)}; {CHANGE_AFTER}")
                return backward(*inputs[:at], *inputs[at + 1 :])

            return body

        function = part.declaration
        inputs = (*function.inputs[:at], type_, *function.inputs[at:])
        aliases = tuple((output, i + (i >= at)) for output, i in function.aliases)
        taking = replace(function, inputs=inputs, aliases=aliases)
        return TracedPart(taking, _around(part.body, traced.second.body, wrap))

    vjp, first = traced.vjp, traced.first
    kept_before = tuple(i for i in vjp.kept if i < at)
    kept_after = tuple(i + 1 for i in vjp.kept if i >= at)
    places = {vjp.backward: at, vjp.input: at}
    outputs = (*first.declaration.outputs, type_)
    return replace(
        traced,
        vjp=replace(vjp, kept=(*kept_before, at, *kept_after) if vjp.weight is not None else ()),
        first=TracedPart(
            replace(first.declaration, outputs=outputs),
            _around(first.body, traced.second.body, noting),
        ),
        second=checking(traced.second, at),
        halves=tuple(
            checking(h, places.get(h.declaration.name, len(kept_before))) for h in traced.halves
        ),
    )


def _around(
    body: Bodies | None, backward: Bodies | None, wrap: Callable[[Body, StateNow], Body]
) -> Bodies:
    """The body with code around it, on each rank with the state of the rank's backward."""

    def around(inner: Body, backward: Body | None) -> Body:
        assert isinstance(backward, GraphBody), "a backward is a graph"
        now = backward.state
        return wrapped_body(inner, lambda code: wrap(code, now))

    assert body is not None, "a graph has a body where it was traced"
    if not isinstance(body, RankBodies):
        return around(body, None if isinstance(backward, RankBodies) else backward)
    assert isinstance(backward, RankBodies), "a forward and its backward run on the same ranks"
    return RankBodies({rank: around(b, backward.at(rank)) for rank, b in body.of_rank.items()})


def _versions(now: StateNow) -> torch.Tensor:
    return torch.tensor([(id(tensor), tensor._version) for tensor in now()]).view(-1, 2)


def changed_between(shown: str, paths: Sequence[str], between: Sequence[Write]) -> str:
    """The message: the backward of `shown` needs state that has changed since its forward."""
    calls = ", ".join(
        f"@{write.function}" + (f" ({write.loc})" if write.loc is not None else "")
        for write in between
    )
    return (
        f"the gradient of {shown} needs {' and '.join(paths)} as its forward has seen it, but a "
        f"call between the two has changed it: {calls}"
    )


CHANGE_AFTER = "call cg.backward before what changes the actor, or call the method again after it"
"""The remedy."""
