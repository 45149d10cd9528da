"""A step that does not wait for the norm of its gradients, and is undone if that was wrong.

Source of the idea: post-validation, Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241,
section 4. There an optimizer's step is undone by inverse arithmetic; here everything is, by copies,
so results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...backends.base import World
from ...backends.errors import RemoteError
from ...tracer.record.actors.undo import Undo
from ..runtime.numbering import Numbering
from ..runtime.step_lock import lock_of
from .compiled import Compiled

_MOST = 64
"""The most calls in a row that run `plain` at once."""


class Optimistic:
    """A step in two programs: one assumes that no gradients have to be clipped, the other clips.

    A call runs the first, `bold`, in which no rank waits for a norm. It also finds out whether the
    assumption was right. If it was not, every rank, since all know it, undoes what the program has
    done to its actors and runs the second, `plain`, on the same inputs. The values, and the actors
    after it, are those of `plain` bit for bit either way.

    After a call that was undone, the next one runs `plain` at once; after further ones the next 2,
    4, up to 64. All ranks come to the same choice.

    Attributes:
        plain, bold: the two programs, to be looked at and simulated; do not call them.
        undone: how many calls were undone.
    """

    def __init__(self, plain: Compiled, bold: Compiled, world: World, numbering: Numbering) -> None:
        self.plain = plain
        self.bold = bold
        self.undone = 0
        self._numbering = numbering
        self._undo = Undo(bold.variants[0].trace.instances)
        place = plain.variants[0].trace.outputs.place
        self._gets_outputs = any(world.plays(rank) for rank in place.ranks)
        self._lock = lock_of(world)
        self._patience = 0
        self._left = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all ranks; collective, and otherwise as `Compiled.__call__`."""
        with self._lock.held(self.plain.module.name):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._left:
            self._left -= 1
            return self.plain(*args, **kwargs)
        self._undo.remember()
        execution = self._numbering.next
        right, result = self._try(args, kwargs)
        if right:
            self._patience = 0
            return result if self._gets_outputs else None
        self._undo.restore()
        self._numbering.next = execution  # random numbers depend on it, whichever program runs
        self.undone += 1
        self._patience = min(max(1, 2 * self._patience), _MOST)
        self._left = self._patience
        return self.plain(*args, **kwargs)

    def state_dict(self) -> dict[str, int]:
        """The state of the step's random numbers, as `Compiled.state_dict` gives it."""
        return self.plain.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, as `Compiled.load_state_dict` does."""
        self.plain.load_state_dict(state)

    def close(self) -> None:
        """Give back the buffers of both programs; idempotent."""
        self.bold.close()
        self.plain.close()

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run the bold program; True if its assumption was right, and its result."""
        try:
            result, assumptions = self.bold(*args, **kwargs)
        except RemoteError:
            # Gradients that should have been clipped may be the cause; if not, `plain` raises, too.
            return False, None
        return all(map(bool, assumptions)), result
