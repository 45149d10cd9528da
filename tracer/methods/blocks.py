"""Trace blocks that a method repeats, such as equal layers, once.

The first of several modules of one class is traced as all code is. Of the next one, only the Python
runs (`function_log.py`): if it calls the same torch functions, as far as tensors of its own stand
for those of the first, then the operators of the first are copied, forward and backward. A block
changes nothing: no tensor in place, and no attribute.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..actors.actor_state import ActorState
from .dispatch_modes import OpRecorder, is_random, nodes_so_far, storage_key
from .function_log import (
    Entry,
    Form,
    FunctionLog,
    OfGraph,
    Rerun,
    Unlike,
    form_of,
    renumbered,
)
from .templates import BlocksMisled, Emitter, First, Template, graph_so_far, like
from .watch import Watch

Handler: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
_MANY = 6
"""So many blocks of one class that differ are kept, and compared with the next one."""


@dataclass(eq=False)
class Block:
    """A block that has been traced: a function of the tensors that it takes from elsewhere.

    Tensors have numbers of their own in it: what it takes has negative ones, in the order of its
    first use, and what it makes has the others.

    Attributes:
        name: its class.
        entries: the torch functions, with stand-ins for what they gave.
        taken: what is known of the tensors that it takes.
        ends: what it gives, by numbers.
        stand_ins: for all tensors that it makes.
        given: those of them that it gives.
        requires_grad: which of these require a gradient.
        first: where it was traced.
        template: its operators; None until another block needs them.
    """

    name: str
    entries: Sequence[Entry]
    taken: tuple[Form, ...]
    ends: Form
    stand_ins: Sequence[torch.Tensor]
    given: Sequence[torch.Tensor]
    requires_grad: tuple[bool, ...]
    first: First
    template: Template | None = None

    @property
    def form(self) -> Form:
        """What blocks have in common that are the same."""
        entries = tuple((each.function, each.arguments, each.settings) for each in self.entries)
        return self.name, entries, self.taken, self.ends, self.requires_grad


@dataclass(frozen=True, slots=True)
class _Taken:
    """Stands for a tensor that a block takes, and that a function has given back as it is."""

    position: int


@dataclass(eq=False)
class Blocks:
    """The blocks of a step's methods so far.

    Attributes:
        known: by class, and by whether gradients are wanted.
        refused: classes of which no block is made.
        tried: whether a module has been compared with a block.
    """

    known: dict[tuple[type, bool], list[Block]] = field(default_factory=dict)
    refused: set[type] = field(default_factory=set)
    tried: bool = False


def repeated_classes(state: ActorState) -> frozenset[type]:
    """The classes of modules of which there are several, outermost first, that have submodules."""
    modules = [obj for obj, _ in state.objects if isinstance(obj, nn.Module)]
    counts = Counter(type(module) for module in modules if module._modules)
    found: set[type] = set()
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if counts[type(module)] > 1 and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.add(type(module))
            return
        for child in module._modules.values():
            if child is not None:
                visit(child)

    for module in modules[:1]:
        visit(module)
    return frozenset(found)


class ModuleCalls:
    """Calls of modules in a method that is traced, or that is compared with one.

    Args:
        blocks: those that are known.
        classes: whose modules may be blocks.
        log: of the method.
        outer: handles torch functions of the method.
        watch: sees attributes that are written.
        wanted: whether gradients are.
        recorder: sees operators; None where none is issued.
    """

    def __init__(
        self,
        blocks: Blocks,
        classes: frozenset[type],
        log: FunctionLog,
        outer: Handler,
        watch: Watch,
        wanted: bool,
        recorder: OpRecorder | None,
    ) -> None:
        self._blocks = blocks
        self._classes = classes - blocks.refused
        self._log = log
        self._outer = outer
        self._watch = watch
        self._wanted = wanted
        self._recorder = recorder
        self._inner: Rerun | None = None
        self._is_inside = False
        self.used = False
        self._stand_ins: set[int] = set()
        self._closed: set[int] = set()
        self._memory: set[int | None] = set()

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a torch function."""
        if self._inner is not None:
            return self._inner.run(function, args, kwargs)
        return self._outer(function, args, kwargs)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Inside the `with` block, calls of modules come by here."""
        if not self._classes:
            yield
            return
        before = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or type(module) not in self._classes:
                return before(module, *args, **kwargs)
            self._is_inside = True
            try:
                return self._call(before, module, args, kwargs)
            finally:
                self._is_inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = before  # type: ignore[method-assign]

    def _call(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        known = self._blocks.known.setdefault((type(module), self._wanted), [])
        for block in reversed(known):
            if self._can_copy(block):
                try:
                    return self._again(block, call, module, args, kwargs)
                except Unlike:
                    continue
        is_traced = self._recorder is not None and nodes_so_far() is not None
        if not is_traced or not self._log.complete or len(known) == _MANY:
            return call(module, *args, **kwargs)
        writes = len(self._watch.writes)
        assert self._recorder is not None
        recording = _Recording(self, self._log, self._recorder)
        result = call(module, *args, **kwargs)
        made: Block | None = None
        if len(self._watch.writes) == writes:
            with torch._C.DisableTorchFunction():
                made = recording.block(type(module).__qualname__, result, known)
        if made is None:
            self._blocks.refused.add(type(module))
            self._classes -= {type(module)}
        elif made not in known:
            known.append(made)
        return result

    def _can_copy(self, block: Block) -> bool:
        if block.template is not None or nodes_so_far() is None:
            return True
        return block.first.nodes[0].graph is graph_so_far()

    def _again(
        self,
        block: Block,
        call: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The result of a module that is like a block.

        Raises:
            Unlike: it is not.
        """
        self._blocks.tried = True
        numbering = _Numbering(block, self._log)
        writes = len(self._watch.writes)
        self._inner = inner = Rerun(block.entries, numbering.number_of, numbering.result_of)
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._inner = None
        with torch._C.DisableTorchFunction():
            return self._taken_over(block, numbering, inner, result, writes)

    def _taken_over(
        self, block: Block, numbering: _Numbering, inner: Rerun, result: Any, writes: int
    ) -> Any:
        """The result of a module whose Python has gone along with that of a block.

        Raises:
            Unlike: it has not ended there, or has written to attributes.
        """
        inner.finish()
        leaves, spec = pytree.tree_flatten(result)
        given = form_of((spec, leaves), numbering.number_of)
        if given != block.ends or len(numbering.taken) != len(block.taken):
            raise Unlike
        if len(self._watch.writes) != writes:
            raise Unlike
        self.used = True
        self._stand_ins.update(map(id, block.stand_ins))
        copied = self._outer(_Copy(block, self), numbering.taken, {})
        instead = {id(old): new for old, new in zip(block.given, copied, strict=True)}
        return pytree.tree_unflatten([instead.get(id(leaf), leaf) for leaf in leaves], spec)

    def copy(self, block: Block, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a block gives for other tensors: its operators are issued once more."""
        recorder = self._recorder
        assert recorder is not None
        if nodes_so_far() is not None and block.template is None:
            block.template = Template.of(block.first, recorder, self._wanted)
        recorder.log.note_block(block.name, taken)
        flags = block.requires_grad
        emitter = Emitter(block.template, block.given, flags, recorder, self._log.mode)
        given = emitter.run(taken)
        recorder.log.note_result("", given)
        recorder.draws |= any(map(_is_random, block.template.forward if block.template else ()))
        self._close(block, taken, given)
        return given

    def _close(
        self, block: Block, taken: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        if not self._closed.isdisjoint(map(id, taken)):
            raise BlocksMisled
        self._memory.update(map(storage_key, (*taken, *made)))
        if block.template is not None:
            several = block.template.used_several_times
            self._closed.update(id(taken[i]) for i in several if taken[i].requires_grad)

    def check_operator(self, args: Iterable[Any], written: Iterable[Any]) -> None:
        """An operator is issued outside of blocks.

        Raises:
            BlocksMisled: it takes what blocks keep to themselves, or changes what they use.
        """
        if self._inner is not None:
            raise self._inner.failure()
        if not self.used:
            return
        forbidden = self._stand_ins | self._closed
        if any(id(value) in forbidden for value in args):
            raise BlocksMisled
        if any(isinstance(v, torch.Tensor) and storage_key(v) in self._memory for v in written):
            raise BlocksMisled

    def check_end(self, values: Iterable[Any]) -> None:
        """The method gives these values.

        Raises:
            BlocksMisled: as above.
        """
        self.check_operator(values, ())


class _Copy(OfGraph):
    """A block as a function that the method calls."""

    def __init__(self, block: Block, calls: ModuleCalls) -> None:
        self.block = block
        self._calls = calls

    def __call__(self, *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._calls.copy(self.block, taken)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Copy) and other.block is self.block

    def __hash__(self) -> int:
        return id(self.block)


class _Numbering:
    """Numbers of the tensors of a module that is compared with a block."""

    def __init__(self, block: Block, log: FunctionLog) -> None:
        self.taken: list[torch.Tensor] = []
        self._block = block
        self._log = log
        self._numbers = {id(tensor): number for number, tensor in enumerate(block.stand_ins)}

    def number_of(self, value: Any) -> int | None:
        """The number of a tensor; one that it takes gets the next, if it is as that was."""
        number = self._numbers.get(id(value))
        if number is not None or self._log.number_of(value) is None:
            return number
        position = len(self.taken)
        taken = self._block.taken
        if position == len(taken) or _metadata(value) != taken[position]:
            return None
        self.taken.append(value)
        self._numbers[id(value)] = ~position
        return ~position

    def result_of(self, result: Any) -> Any:
        """What a function gives: for what it has taken, that itself."""
        if isinstance(result, _Taken):
            return self.taken[result.position]
        return [*map(self.result_of, result)] if type(result) is list else result


class _Recording:
    """The part of a trace in which a module is called."""

    def __init__(self, calls: ModuleCalls, log: FunctionLog, recorder: OpRecorder) -> None:
        self._calls = calls
        self._log = log
        self._recorder = recorder
        self._entries = len(log.entries)
        self._count = log.count
        self._mark = recorder.log.mark()
        self._nodes = len(nodes_so_far())

    def block(self, name: str, result: Any, known: Sequence[Block]) -> Block | None:
        """The block, which the logs know as one from now on; None if it cannot be one.

        Args:
            known: of these, one that is the same and has no template is taken, with a new trace.
        """
        log, count = self._log, self._count
        entries = log.entries[self._entries :]
        if not log.complete or len({entry.settings for entry in entries}) != 1:
            return None
        numbers: list[int] = []

        def number(old: int) -> int:
            if old >= count:
                return old - count
            if old not in numbers:
                numbers.append(old)
            return ~numbers.index(old)

        try:
            made = [log.tensor(i) for i in range(count, log.count)]
            stand_ins = [_stand_in(tensor, log.mode) for tensor in made]
            new = [self._entry(entry, number, stand_ins) for entry in entries]
            leaves, spec = pytree.tree_flatten(result)
            ends = renumbered(form_of((spec, leaves), log.number_of), number)
        except Unlike:
            return None
        taken = [log.tensor(i) for i in numbers]
        given = [made[i] for i in _made_numbers(ends)]
        nodes = itertools.islice(reversed(nodes_so_far()), len(nodes_so_far()) - self._nodes)
        first = First([*nodes][::-1], taken, given)
        if not first.is_pure:
            return None
        shown = [stand_ins[i] for i in _made_numbers(ends)]
        flags = tuple(tensor.requires_grad for tensor in given)
        metadata = tuple(map(_metadata, taken))
        block = Block(name, new, metadata, ends, stand_ins, shown, flags, first)
        for other in known:
            if other.form == block.form:
                other.first = first
                block = other
        arguments: Form = (tuple(numbers), ())
        copy = Entry(_Copy(block, self._calls), arguments, entries[0].settings, tuple(given))
        log.fold(self._entries, count, copy, given)
        self._recorder.log.note_block(name, taken, self._mark)
        self._recorder.log.note_result("", tuple(given))
        return block

    def _entry(
        self, entry: Entry, number: Callable[[int], int], stand_ins: Sequence[torch.Tensor]
    ) -> Entry:
        """An entry of the block."""
        positional, named = entry.arguments
        arguments = (
            tuple([renumbered(form, number) for form in positional]),
            tuple([(name, renumbered(form, number)) for name, form in named]),
        )

        def stand_in(value: Any) -> Any:
            found = self._log.number_of(value)
            if found is None:
                return value
            return (
                stand_ins[found - self._count] if found >= self._count else _Taken(~number(found))
            )

        result = entry.result
        if isinstance(result, torch.Tensor):
            result = stand_in(result)
        elif type(result) in (tuple, list):
            result = type(result)(map(stand_in, result))
        leaves = pytree.tree_leaves(result)
        known = set(map(id, stand_ins))
        if any(isinstance(each, torch.Tensor) and id(each) not in known for each in leaves):
            raise Unlike  # of a class of its own, such as that of a maximum with its index
        if type(result) is tuple and any(isinstance(each, _Taken) for each in result):
            raise Unlike
        return replace(entry, arguments=arguments, result=result)


def _made_numbers(ends: Form) -> list[int]:
    """The numbers of the tensors that a block makes and gives, in order."""
    found: set[int] = set()

    def note(number: int) -> int:
        found.add(number)
        return number

    renumbered(ends, note)
    return sorted(number for number in found if number >= 0)


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like this one that no graph knows.

    Raises:
        Unlike: there is none.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise Unlike
    return like(tensor, mode)


def _metadata(tensor: torch.Tensor) -> Form:
    """What tensors have in common that can stand for each other."""
    kind = (tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tuple(tensor.shape))
    if tensor.layout is not torch.strided:
        return (*kind, tensor.layout)
    return (*kind, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())


def _is_random(node: fx.Node) -> bool:
    return is_random(node.target, node.args, node.kwargs)
