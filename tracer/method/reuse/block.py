"""Blocks: what is known of a traced module, so that the next one can be compared with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ...values.operators import storage_key
from ..purity.dispatch_modes import OpRecorder, nodes_so_far
from ..purity.function_log import Form, FunctionLog, LogEntry, OfGraph, Unlike, form_of, renumbered
from .templates import First, Template, like, node_of


@dataclass(eq=False)
class Block:
    """A traced block: a function of the tensors that it takes from outside.

    A block numbers its tensors. Those that it takes have negative numbers, in the order of their
    first use. Those that it makes are numbered from 0.

    Attributes:
        name: the name of its class.
        entries: its torch functions, with stand-ins for their results.
        taken: the metadata of the tensors that it takes.
        ends: what it returns, with numbers for tensors.
        stand_ins: stand-ins for all tensors that it makes.
        returned: the stand-ins of the tensors that it returns.
        requires_grad: which tensors of `returned` require a gradient.
        written: positions of the tensors that it takes and writes to.
        shared: for a block that writes, which of the tensors that it takes share memory, as
            `shared_memory` says.
        first: its trace.
        template: its operators; None until a module copies them.
    """

    name: str
    entries: Sequence[LogEntry]
    taken: tuple[Form, ...]
    ends: Form
    stand_ins: Sequence[torch.Tensor]
    returned: Sequence[torch.Tensor]
    requires_grad: tuple[bool, ...]
    written: tuple[int, ...]
    shared: tuple[int, ...]
    first: First
    template: Template | None = None

    @property
    def form(self) -> Form:
        """The key that equal blocks have in common."""
        entries = tuple((entry.function, entry.arguments, entry.settings) for entry in self.entries)
        return self.name, entries, self.taken, self.ends, self.requires_grad, self.shared

    def fits(self, taken: Sequence[torch.Tensor]) -> bool:
        """True if it can be copied for tensors that have the metadata of those that it takes."""
        alike = len(taken) == len(self.taken)
        return alike and (not self.written or shared_memory(taken) == self.shared)


@dataclass(frozen=True, slots=True)
class Taken:
    """Stands for a tensor that a block takes, where a function has returned it unchanged."""

    position: int


Copier: TypeAlias = Callable[[Block, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
"""Takes a block and other tensors, and gives the block's results for them."""


class BlockFunction(OfGraph):
    """A block as a function that the method calls."""

    def __init__(self, block: Block, copy: Copier) -> None:
        self.block = block
        self._copy = copy

    def __call__(self, *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._copy(self.block, taken)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockFunction) and other.block is self.block

    def __hash__(self) -> int:
        return id(self.block)


class TensorNumbers:
    """Numbers of the tensors of a module that is compared with a block."""

    def __init__(self, block: Block, log: FunctionLog) -> None:
        self.taken: list[torch.Tensor] = []
        self._block = block
        self._log = log
        self._numbers = {id(tensor): number for number, tensor in enumerate(block.stand_ins)}

    def number_of(self, value: Any) -> int | None:
        """The number of a tensor; None for anything else.

        A tensor from outside gets the next negative number, if it is like the tensor that the block
        has taken there. If not, it gets none.
        """
        number = self._numbers.get(id(value))
        if number is not None or self._log.number_of(value) is None:
            return number
        position = len(self.taken)
        taken = self._block.taken
        with torch._C.DisableTorchFunction():
            if position == len(taken) or _metadata(value) != taken[position]:
                return None
        self.taken.append(value)
        self._numbers[id(value)] = ~position
        return ~position

    def result_of(self, result: Any) -> Any:
        """The result of a function, with the module's own tensors in place of each `Taken`."""
        if isinstance(result, Taken):
            return self.taken[result.position]
        return [*map(self.result_of, result)] if type(result) is list else result


class BlockRecording:
    """The part of a trace in which a module is called."""

    def __init__(self, copy: Copier, log: FunctionLog, recorder: OpRecorder) -> None:
        self._copy = copy
        self._log = log
        self._recorder = recorder
        self._entries = len(log.entries)
        self._count = log.count
        self._mark = recorder.log.mark()
        self._nodes = len(nodes_so_far())
        self._sources = [node_of(log.tensor(number)) for number in range(log.count)]
        self._asked = recorder.constants.asked

    def block(self, name: str, result: Any, known: Sequence[Block]) -> Block | None:
        """Make the block, and fold its entries in the logs into one; None if it cannot be a block.

        Args:
            name: the name of the module's class.
            result: what the module has returned.
            known: blocks of the class. An equal one is used again, with the new trace.
        """
        log, count = self._log, self._count
        entries = log.entries[self._entries :]
        if not log.complete or len({entry.settings for entry in entries}) != 1:
            return None
        if self._recorder.constants.asked != self._asked:
            return None  # shapes inside follow from values of what it takes
        numbers: list[int] = []

        def number(old: int) -> int:
            if old >= count:
                return old - count
            if old not in numbers:
                numbers.append(old)
            return ~numbers.index(old)

        try:
            block_tensors = [log.tensor(i) for i in range(count, log.count)]
            stand_ins = [_stand_in(tensor, log.mode) for tensor in block_tensors]
            new = [self._entry(entry, number, stand_ins) for entry in entries]
            leaves, spec = pytree.tree_flatten(result)
            ends = renumbered(form_of((spec, leaves), log.number_of), number)
        except Unlike:
            return None
        taken = [log.tensor(i) for i in numbers]
        outputs = [block_tensors[i] for i in made_numbers(ends)]
        nodes = itertools.islice(reversed(nodes_so_far()), len(nodes_so_far()) - self._nodes)
        first = First.of([*nodes][::-1], taken, [self._sources[i] for i in numbers], outputs)
        if first is None:
            return None
        shown = [stand_ins[i] for i in made_numbers(ends)]
        flags = tuple(tensor.requires_grad for tensor in outputs)
        metadata = tuple(map(_metadata, taken))
        written = first.written
        shared = shared_memory(taken) if written else ()
        block = Block(name, new, metadata, ends, stand_ins, shown, flags, written, shared, first)
        for known_block in known:
            if known_block.form == block.form:
                known_block.first = first
                block = known_block
        arguments: Form = (tuple(numbers), ())
        copy = LogEntry(
            BlockFunction(block, self._copy), arguments, entries[0].settings, tuple(outputs)
        )
        log.fold(self._entries, count, copy, outputs)
        self._recorder.log.note_block(name, taken, self._mark)
        self._recorder.log.note_result("", tuple(outputs))
        return block

    def _entry(
        self, entry: LogEntry, number: Callable[[int], int], stand_ins: Sequence[torch.Tensor]
    ) -> LogEntry:
        """An entry of the log as an entry of the block.

        Raises:
            Unlike: its result holds what no stand-in can replace.
        """
        positional, named = entry.arguments
        arguments = (
            tuple([renumbered(form, number) for form in positional]),
            tuple([(name, renumbered(form, number)) for name, form in named]),
        )

        def stand_in(value: Any) -> Any:
            log_number = self._log.number_of(value)
            if log_number is None:
                return value
            return (
                stand_ins[log_number - self._count]
                if log_number >= self._count
                else Taken(~number(log_number))
            )

        result = entry.result
        if isinstance(result, torch.Tensor):
            result = stand_in(result)
        elif type(result) in (tuple, list):
            result = type(result)(map(stand_in, result))
        leaves = pytree.tree_leaves(result)
        known = set(map(id, stand_ins))
        if any(isinstance(leaf, torch.Tensor) and id(leaf) not in known for leaf in leaves):
            raise Unlike  # in a class of its own, such as that of a maximum with its index
        if type(result) is tuple and any(isinstance(item, Taken) for item in result):
            raise Unlike
        return replace(entry, arguments=arguments, result=result)


def made_numbers(ends: Form) -> list[int]:
    """The numbers of the tensors that a block makes and returns, in order."""
    numbers: set[int] = set()

    def note(number: int) -> int:
        numbers.add(number)
        return number

    renumbered(ends, note)
    return sorted(number for number in numbers if number >= 0)


def shared_memory(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each of some tensors the number of its memory, in the order of their first use."""
    numbers: dict[int | None, int] = {}
    return tuple(numbers.setdefault(storage_key(tensor), len(numbers)) for tensor in tensors)


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like this one that no graph knows.

    Raises:
        Unlike: the tensor is not dense, or is conjugated or negated lazily.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise Unlike
    return like(tensor, mode)


def _metadata(tensor: torch.Tensor) -> Form:
    """The key of tensors that can stand for each other."""
    kind = (tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tuple(tensor.shape))
    if tensor.layout is not torch.strided:
        return (*kind, tensor.layout)
    return (*kind, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
