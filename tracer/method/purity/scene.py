"""Run a call on fakes in place of its actor's state, and put everything back afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...values.actor_state import put_state
from ...values.float8_layers import Float8Recipe
from ...values.heap.reach import Reach, reach_modules
from ...values.heap.snapshot import Snapshot
from ...values.heap.variables import users_modules
from ...values.interface import TracedCall
from ..replaced.replaced_functions import ReplacedFunctions
from .as_eager import checkpoints_as_eager, compiled_as_eager
from .changes import Initialization
from .fake_types import real_kinds
from .module_paths import (
    averages_over_all_batches,
    padded_rows_zeroed,
    without_fused_recurrence,
)
from .randomness import generator_watched
from .side_effects import SideEffects, UsersModules
from .watch import AttributeWatch


class Scene:
    """The surroundings of a call that is traced: its actor holds fakes in place of its state.

    Attributes:
        call: the call.
        mode: makes the fakes.
        state, inputs: the fakes.
        watch: notes which of its actor's attributes the call reads and writes.
        attributes: what the actor holds when the call begins, inside of `fakes_in_place`.
        initial: changes that it has made, and that perhaps only the first call makes.
    """

    def __init__(self, call: TracedCall, mode: FakeTensorMode) -> None:
        self.call = call
        self.mode = mode
        self.state: Sequence[torch.Tensor] = ()
        self.inputs: Sequence[torch.Tensor] = ()
        self.watch = AttributeWatch(call.state)
        self.initial: list[Initialization] = []
        self.attributes = Snapshot(())
        self._changed: Callable[[], bool] = lambda: False

    def has_side_effects(self) -> bool:
        """True if the call has so far changed its actor, or something outside of it."""
        return self._changed()

    def float8_weights(self) -> dict[int, tuple[str, Float8Recipe]]:
        """The weights that are multiplied in float8, by the ids of their fakes."""
        tensors, use = self.call.state.tensors, self.call.float8
        recipes = {} if use is None else use.recipes(tensors)
        return {
            id(fake): (tensor.path, recipes[tensor.path])
            for fake, tensor in zip(self.state, tensors, strict=True)
            if tensor.path in recipes
        }

    @contextmanager
    def fakes_in_place(self, compares: bool) -> Iterator[None]:
        """Put fakes in place of the state inside the `with` block.

        Afterwards everything is as before, whatever happens.

        Args:
            compares: whether the call is compared with another. Then it may be left where it
                differs, and whatever it has changed in the user's modules is undone.

        Raises:
            TraceError: on exit, if the call has made a change that a graph cannot make.
        """
        state = self.call.state
        original = Snapshot(state.containers)
        contents = Snapshot(state.others)
        surroundings = SideEffects(self.call.function, state)
        with ExitStack() as stack:
            # An undo that is interrupted runs once more: the weights must come back.
            for undo in (
                original.restore,
                self.watch.restore,
                contents.restore,
                surroundings.undo,
            ):
                stack.callback(_surely, undo)
            put_state(state, self.state)
            modules = users_modules()
            with self._as_it_runs(modules):
                own = surroundings.changed_places()  # of the modes
                attributes = self.attributes = Snapshot(state.containers)
                elsewhere = UsersModules(reach_modules(modules) if compares else Reach())
                self._changed = lambda: (
                    bool(attributes.changes() or contents.changes() or elsewhere.changes())
                    or surroundings.changed_places() != own
                )
                try:
                    yield
                except BaseException:
                    elsewhere.undo()
                    raise
            self._refuse_contents(contents)
            self.initial += surroundings.check(self.call)

    @contextmanager
    def _as_it_runs(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """Enter the modes in which a call on fakes behaves like a real one, and is watched.

        Args:
            modules: the user's own.
        """
        state, function = self.call.state, self.call.function
        space = getattr(inspect.unwrap(function), "__globals__", {})
        kinds = {id(f): type(t.tensor) for f, t in zip(self.state, state.tensors, strict=True)}
        with (
            self.mode,
            self.watch,
            real_kinds(kinds, (space, *map(vars, modules))),
            generator_watched(self.call.shown),
            padded_rows_zeroed(state),
            without_fused_recurrence(state),
            averages_over_all_batches(state),
            checkpoints_as_eager(),
            compiled_as_eager(),
            ReplacedFunctions(self.call.is_of_mesh),
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
