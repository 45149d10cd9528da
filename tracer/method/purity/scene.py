"""Let a call run on fakes: they stand in the place of its actor's state, and all is put back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...values.actor_state import put_state
from ...values.heap.snapshot import Snapshot
from ...values.interface import Call
from .changes import Initialization
from .checkpoints import checkpoints_as_eager
from .fake_types import real_kinds
from .module_paths import padded_rows_zeroed, without_fused_recurrence
from .randomness import generator_watched
from .side_effects import SideEffects
from .watch import Watch


class Scene:
    """What a call finds when it is traced, instead of its actor as it is.

    Attributes:
        call: the call.
        mode: makes the fakes.
        state, inputs: the fakes.
        watch: what it reads and writes of its actor's attributes.
        initial: changes that it has made and that may be of the first call only.
    """

    def __init__(self, call: Call, mode: FakeTensorMode) -> None:
        self.call = call
        self.mode = mode
        self.state: Sequence[torch.Tensor] = ()
        self.inputs: Sequence[torch.Tensor] = ()
        self.watch = Watch(call.state)
        self.initial: list[Initialization] = []

    @contextmanager
    def fakes_in_place(self) -> Iterator[None]:
        """Runs a call with fakes for the state; afterwards all is as before, whatever happens."""
        state = self.call.state
        original = Snapshot(state.containers)
        contents = Snapshot(state.others)
        surroundings = SideEffects(self.call.function, state)
        with ExitStack() as stack:
            # Interrupted half way, each of them is done once more: the weights must come back.
            for undo in (
                original.restore,
                self.watch.restore,
                contents.restore,
                surroundings.undo,
            ):
                stack.callback(_surely, undo)
            put_state(state, self.state)
            with self._as_it_runs():
                yield
            self._refuse_contents(contents)
            self.initial += surroundings.check(self.call)

    @contextmanager
    def _as_it_runs(self) -> Iterator[None]:
        """Fakes in the place of tensors, watched attributes, and what else makes it look real."""
        state, function = self.call.state, self.call.function
        space = getattr(inspect.unwrap(function), "__globals__", {})
        kinds = {id(f): type(t.tensor) for f, t in zip(self.state, state.tensors, strict=True)}
        with (
            self.mode,
            self.watch,
            real_kinds(kinds, space),
            generator_watched(self.call.what),
            padded_rows_zeroed(state),
            without_fused_recurrence(state),
            checkpoints_as_eager(),
        ):
            yield

    def _refuse_contents(self, contents: Snapshot) -> None:
        for change in contents.changes():
            raise self.call.refusal(
                f"it changes what is in the attribute '{change.path}'; a traced method runs once, "
                "so the change would be lost",
                "mark the method with @cg.opaque; numbers that change can be in a buffer "
                "(self.register_buffer), random numbers come from torch functions",
            )


def _surely(undo: Callable[[], None]) -> None:
    """Undo, and, if that is interrupted, undo again."""
    try:
        undo()
    except BaseException:
        undo()
        raise
