"""Compare a part over pages with the model's own forward, on a short text, before it serves.

Nothing is known of a model beforehand. One that takes positions from the length of its cache, say,
would give other tokens without a word, so a part whose values differ is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .parts import KeyValues
from .pools import Pool
from .states import Slots, StateName

LENGTH, SIZE, BLOCKS = 6, 2, 3
"""Tokens of the text, of a block, and blocks of each of two sequences."""
SHOWN = 1024
"""Keys that rows are shown, most of them of the trash. With a window of its own, or with positions,
that it takes from their number, a model would see other tokens than it should."""
ASKED = 1 << 14
"""The same for a model that asks how long its cache is; it is served no longer sequences."""
STALE = 50.0
"""What pools hold beforehand, which no token may see."""
TOLERANCE = 2e-4
COARSE = 0.1
"""Of types of less precision than float32: there a near tie may choose another expert."""

Span = tuple[int, int, int]
"""A sequence, and the tokens from a start to a stop."""
STEPS: Sequence[tuple[bool, tuple[Span, ...]]] = (
    (False, ((0, 0, 3), (1, 0, 2))),
    (True, ((0, 3, 5), (1, 2, 4))),
    (True, ((0, 5, 6), (1, 4, 5))),
)
"""Batches, with tables or without: prompts that begin, chunks that go on, a decode step."""
STEPS_OF_STATES: Sequence[tuple[bool, tuple[Span, ...]]] = (
    (False, ((0, 0, 3),)),
    (True, ((0, 3, 5),)),
    (True, ((1, 0, 2),)),
    (True, ((0, 5, 6), (1, 2, 3))),
)
"""The same without padding, which would be in the states of those rows; and a prompt that begins
with a table."""
STEPS_BY_ONE: Sequence[tuple[bool, tuple[Span, ...]]] = (
    (False, ((0, 0, 3),)),
    (True, ((0, 3, 4),)),
    (True, ((0, 4, 5),)),
    *STEPS_OF_STATES[2:],
)
"""The same for models whose code forgets a state where several tokens go on with it."""


@runtime_checkable
class _Rounding(Protocol):
    """A layer that may round its inputs to a quantized type."""

    rounds_inputs: bool


class Trial:
    """A run of a part on a text, as the model itself runs, and over pages.

    Args:
        part: a `DecoderPart`.
        kept: what its layers keep.
        hidden: the width of what a part takes that is not the first.
        vocabulary: the number of tokens.
        shown: keys that rows are shown.
        dtype: of the weights.
        ranks: over which the pages are spread.
    """

    def __init__(
        self,
        part: Any,
        kept: Mapping[int, KeyValues],
        hidden: int,
        vocabulary: int,
        shown: int,
        dtype: torch.dtype,
        ranks: int = 1,
    ) -> None:
        self.part, self.kept, self.dtype = part, kept, dtype
        self.shown = shown
        self._lie_on(ranks)
        self.steps = STEPS
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(
            min(3, vocabulary - 1), vocabulary, (1, LENGTH), generator=generator
        )
        noise = torch.randn(1, LENGTH, hidden, generator=generator).to(dtype)
        self.x = self.ids if part.is_first else noise
        self.wanted = torch.empty(0)

    def _lie_on(self, ranks: int) -> None:
        """Spread pages over ranks, with so few tokens on each that the text has several blocks."""
        self.pool = Pool(1 + 2 * BLOCKS, SIZE if ranks == 1 else 1, ranks=ranks)
        self.span = self.pool.size * ranks
        self.width = max(BLOCKS, self.shown // self.span)

    def run_plainly(self) -> None:
        """Run the model's own forward."""
        with torch.no_grad(), _exact_inputs(self.part):
            self.wanted = self.part.plainly(self.x, self.ids)

    def compare(self, name: str) -> bool:
        """Run over pages, and compare.

        Args:
            name: of the model, for the message.

        Returns:
            Whether a chunk of several tokens may go on with its prompt.

        Raises:
            ValueError: the values differ.
        """
        try:
            return self._compare(name)
        except ValueError as error:
            if self.pool.ranks == 1:
                raise
            self._lie_on(1)
            self._compare(name)  # which raises for models that are not served at all
            raise ValueError(
                f"{error}; one rank serves it, so leave out --cp, which shares the attention that "
                "transformers looks up by name"
            ) from error

    def _compare(self, name: str) -> bool:
        for steps in (STEPS_OF_STATES, STEPS_BY_ONE) if self.part.states else (STEPS,):
            self.steps, is_by_one = steps, steps is STEPS_BY_ONE
            if self._is_equal(name) and (is_by_one or self._reads_states()):
                return not is_by_one
        raise ValueError(
            f"{name} is not served: {self._culprit()} gives other values over pages than in the "
            "model's own forward"
        )

    def _is_equal(self, name: str) -> bool:
        try:
            errors = self._errors()
        except Exception as error:  # whatever the model's code raises
            raise ValueError(
                f"{name} is not served: over pages it raises {type(error).__name__}: {error}"
            ) from error
        if self.dtype is torch.float32:
            return max(map(max, errors)) <= TOLERANCE
        return max(map(min, errors)) <= COARSE

    def _errors(self) -> list[list[float]]:
        """For each batch and each of its rows the distance of the last token from what it should
        be, relative to that."""
        errors = []
        pools, states = self._pools(), self._states()
        for batch in self.steps:
            out = self._run(pools, states, *batch)
            errors.append([])
            for row, (_, start, stop) in enumerate(batch[1]):
                mine = out[row, 0] if self.part.is_last else out[row, stop - start - 1]
                wanted = self.wanted[0, stop - 1].float()
                distance = (mine.float() - wanted).norm() / wanted.norm().clamp(min=1e-9)
                errors[-1].append(float(distance) if distance.isfinite() else torch.inf)
        return errors

    def _reads_states(self) -> bool:
        """True unless a chunk of several tokens forgets the states of some kind.

        With small weights a state that is forgotten would hardly change values, and adapters may
        make it matter, so states are made large.
        """
        if not self.part.states:
            return True
        has_tables, spans = self.steps[1]

        def run(kind: tuple[bool, int] | None) -> Tensor:
            states = self._states()
            pools = {layer: torch.zeros_like(pool) for layer, pool in self._pools().items()}
            for name, state in states.items():
                if (name.is_recurrent, name.index) != kind:
                    state.zero_()
            return self._run(pools, states, has_tables, spans)

        plain = run(None)
        kinds = {(name.is_recurrent, name.index) for name in self.part.states}
        return not any(torch.equal(run(kind), plain) for kind in kinds)

    def _pools(self) -> dict[int, Tensor]:
        return {
            layer: torch.full(self.pool.shape(kept), STALE).to(self.dtype)
            for layer, kept in self.kept.items()
        }

    def _states(self) -> dict[StateName, Tensor]:
        """With a slot for padding, and one for each sequence."""
        return {
            name: torch.full((3, *state.shape), STALE, dtype=state.dtype)
            for name, state in self.part.states.items()
        }

    def _run(
        self,
        pools: Mapping[int, Tensor],
        states: Mapping[StateName, Tensor],
        has_tables: bool,
        spans: Sequence[Span],
    ) -> Tensor:
        tokens = max(stop - start for _, start, stop in spans)
        x = self.x.new_zeros(len(spans), tokens, *self.x.shape[2:])
        positions = torch.zeros(len(spans), tokens, dtype=torch.int64)
        entries = torch.zeros_like(positions)
        tables = torch.zeros(len(spans), self.width, dtype=torch.int64)
        for row, (sequence, start, stop) in enumerate(spans):
            count, at = stop - start, torch.arange(start, stop)
            tables[row, :BLOCKS] = 1 + sequence * BLOCKS + torch.arange(BLOCKS)
            x[row, :count], positions[row] = self.x[0, start:stop], start
            positions[row, :count] = at
            entries[row, :count] = tables[row, at // self.span] * self.span + at % self.span
        tables = tables if has_tables else tables[:, :0]
        numbers = torch.tensor([1 + sequence for sequence, _, _ in spans])
        slots = Slots(states, numbers, positions[:, 0] == 0 if has_tables else None)
        where = pools, self.pool.size, positions, entries.flatten(), tables, slots
        pages = self.pool.pages(*where, cuts_tokens=tokens > 1)
        last = torch.tensor([[stop - start - 1] for _, start, stop in spans])
        with torch.no_grad(), _exact_inputs(self.part):
            out: Tensor = self.part(x, positions, pages, last)
        return out

    def _culprit(self) -> str:
        """The first module whose output differs, in words."""
        with _outputs(self.part) as wanted:
            self.run_plainly()
        pools, states = self._pools(), self._states()
        for has_tables, spans in self.steps:
            with _outputs(self.part) as outputs:
                self._run(pools, states, has_tables, spans)
            _, start, stop = spans[0]
            for path, (module, tensor) in outputs.items():
                right = wanted.get(path, (module, tensor[:0]))[1][:, start:stop]
                mine = tensor[:1, : stop - start]
                if mine.shape == right.shape and _differ(mine, right):
                    return f"{path.removeprefix('part.model.')} ({type(module).__name__})"
        return "it"


def _differ(one: Tensor, other: Tensor) -> bool:
    distance = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9)
    return not float(distance) <= TOLERANCE


@contextmanager
def _exact_inputs(part: nn.Module) -> Iterator[None]:
    """Inside the `with` block, layers do not round their inputs.

    A number near the middle of two of 8 bits is rounded to either by the least difference, and more
    of them are with each layer.
    """
    rounding = [m for m in part.modules() if isinstance(m, _Rounding) and m.rounds_inputs]
    for layer in rounding:
        layer.rounds_inputs = False
    try:
        yield
    finally:
        for layer in rounding:
            layer.rounds_inputs = True


@contextmanager
def _outputs(part: nn.Module) -> Iterator[dict[str, tuple[nn.Module, Tensor]]]:
    """Inside the `with` block, the first tensor that each module gives, in order, by path."""
    outputs: dict[str, tuple[nn.Module, Tensor]] = {}

    def noting(path: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            tensors = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.dim() > 1]
            if tensors:
                outputs[path] = module, tensors[0].clone()

        return note

    hooks = [module.register_forward_hook(noting(path)) for path, module in part.named_modules()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
