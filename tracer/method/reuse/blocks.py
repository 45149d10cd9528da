"""Trace only once the blocks that a method repeats, such as equal layers.

The first of several modules of one class is traced like any code. Of the next one, only the Python
runs (`function_log.py`). If it calls the same torch functions, with its own tensors in place of
those of the first, the operators of the first are copied, forward and backward. A block changes no
attributes, and writes to tensors that it takes, such as a cache, only where no gradient passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from ...function_runs import Run
from ...torch_settings import settings_restored_on_failure
from ...values.actor_state import ActorState
from ...values.operators import is_random, storage_key
from ..purity.dispatch_modes import OpRecorder, nodes_so_far
from ..purity.function_log import FunctionLog, Rerun, Unlike, form_of
from ..purity.watch import AttributeWatch
from ..rows.row_values import RowValue
from .block import Block, BlockFunction, BlockRecording, TensorNumbers
from .templates import BlocksMisled, Emitter, Template, graph_so_far

_MANY = 6
"""The most blocks of one class that are kept, and compared with the next module."""


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
    """The outermost classes with submodules that several modules of an actor have."""
    modules = [obj for obj, _ in state.objects if isinstance(obj, nn.Module)]
    counts = Counter(type(module) for module in modules if module._modules)
    classes: set[type] = set()
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if counts[type(module)] > 1 and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            classes.add(type(module))
            return
        for child in module._modules.values():
            if child is not None:
                visit(child)

    for module in modules[:1]:
        visit(module)
    return frozenset(classes)


class ModuleCalls:
    """Calls of modules in a method that is traced, or that is compared with a trace.

    Args:
        blocks: the known blocks.
        classes: the classes whose modules may be blocks.
        log: the method's torch functions.
        outer: runs torch functions outside of blocks.
        watch: notes writes of attributes.
        wanted: whether gradients are wanted.
        recorder: notes operators; None where none is issued.
        has_side_effects: says whether the method has so far changed its actor, or something
            outside of it.
    """

    def __init__(
        self,
        blocks: Blocks,
        classes: frozenset[type],
        log: FunctionLog,
        outer: Run,
        watch: AttributeWatch,
        wanted: bool,
        recorder: OpRecorder | None,
        has_side_effects: Callable[[], bool],
    ) -> None:
        self._blocks = blocks
        self._classes = classes - blocks.refused
        self._log = log
        self._outer = outer
        self._watch = watch
        self._wanted = wanted
        self._recorder = recorder
        self._has_side_effects = has_side_effects
        self._inner: Rerun | None = None
        self._is_inside = False
        self.used = False
        self._stand_ins: set[int] = set()
        self._closed: set[int] = set()
        self._memory: set[int | None] = set()

    @property
    def compares(self) -> bool:
        """Whether a module may be compared with a block."""
        return bool(self._classes)

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a torch function."""
        if self._inner is not None:
            return self._inner.run(function, args, kwargs)
        return self._outer(function, args, kwargs)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Intercept calls of modules inside the `with` block."""
        if not self._classes:
            yield
            return
        before = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_known = type(module) in self._classes
            if self._is_inside or not is_known or _takes_rows(args, kwargs):
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
        writes = len(self._watch.writes)
        known = self._blocks.known.setdefault((type(module), self._wanted), [])
        for block in reversed(known):
            if self._can_copy(block):
                try:
                    return self._again(block, call, module, args, kwargs)
                except Unlike:
                    self._check_changes(writes)
        is_traced = self._recorder is not None and nodes_so_far() is not None
        if not is_traced or not self._log.complete or len(known) == _MANY:
            return call(module, *args, **kwargs)
        assert self._recorder is not None
        recording = BlockRecording(self.copy, self._log, self._recorder)
        result = call(module, *args, **kwargs)
        new_block: Block | None = None
        if len(self._watch.writes) == writes:
            with torch._C.DisableTorchFunction():
                new_block = recording.block(type(module).__qualname__, result, known)
        if new_block is None:
            self._blocks.refused.add(type(module))
            self._classes -= {type(module)}
        elif new_block not in known:
            known.append(new_block)
        return result

    def _check_changes(self, writes: int) -> None:
        """Check that a comparison that ended early leaves nothing behind, which a trace would read.

        Raises:
            BlocksMisled: it may do.
        """
        if len(self._watch.writes) != writes or self._has_side_effects():
            raise BlocksMisled

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
            Unlike: the module is not like the block.
        """
        self._blocks.tried = True
        numbering = TensorNumbers(block, self._log)
        writes = len(self._watch.writes)
        self._inner = inner = Rerun(block.entries, numbering.number_of, numbering.result_of)
        try:
            with settings_restored_on_failure():
                result = call(module, *args, **kwargs)
        finally:
            self._inner = None
        with torch._C.DisableTorchFunction():
            return self._taken_over(block, numbering, inner, result, writes)

    def _taken_over(
        self, block: Block, numbering: TensorNumbers, inner: Rerun, result: Any, writes: int
    ) -> Any:
        """The result of a module whose Python has called the torch functions of a block.

        Raises:
            Unlike: it has called fewer, returns something else, or has written to attributes.
        """
        inner.finish()
        leaves, spec = pytree.tree_flatten(result)
        ends = form_of((spec, leaves), numbering.number_of)
        if ends != block.ends or not block.fits(numbering.taken):
            raise Unlike
        if len(self._watch.writes) != writes:
            raise Unlike
        self.used = True
        self._stand_ins.update(map(id, block.stand_ins))
        copied = self._outer(BlockFunction(block, self.copy), numbering.taken, {})
        instead = {id(old): new for old, new in zip(block.returned, copied, strict=True)}
        return pytree.tree_unflatten([instead.get(id(leaf), leaf) for leaf in leaves], spec)

    def copy(self, block: Block, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Issue the operators of a block for other tensors, and return its results."""
        recorder = self._recorder
        assert recorder is not None
        if nodes_so_far() is not None and block.template is None:
            block.template = Template.of(block.first, recorder, self._wanted)
        recorder.log.note_block(block.name, taken)
        self._note_writes(recorder, [taken[position] for position in block.written])
        flags = block.requires_grad
        emitter = Emitter(block.template, block.returned, flags, recorder, self._log.mode)
        outputs = emitter.run(taken)
        recorder.log.note_result("", outputs)
        recorder.draws |= any(map(_is_random, block.template.forward if block.template else ()))
        self._close(block, taken, outputs)
        return outputs

    def _note_writes(self, recorder: OpRecorder, written: Sequence[torch.Tensor]) -> None:
        """Note what a copy of a block writes to.

        Raises:
            BlocksMisled: other copies use their memory.
        """
        if not self._memory.isdisjoint(map(storage_key, written)):
            raise BlocksMisled
        recorder.note_writes("a module like an earlier one", written)
        # No operator writes to the fakes, and autograd refuses what was saved ahead of a write.
        torch.autograd.graph.increment_version(written)

    def _close(
        self, block: Block, taken: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        if not self._closed.isdisjoint(map(id, taken)):
            raise BlocksMisled
        self._memory.update(map(storage_key, (*taken, *outputs)))
        if block.template is not None:
            several = block.template.used_several_times
            self._closed.update(id(taken[i]) for i in several if taken[i].requires_grad)

    def check_operator(self, args: Iterable[Any], written: Iterable[Any]) -> None:
        """Check an operator that is issued outside of blocks.

        Args:
            args: what it takes.
            written: what it writes to.

        Raises:
            BlocksMisled: it takes a tensor that only blocks may use, or writes to memory of blocks.
            Unlike: a module is being compared with a block, which issues no operators.
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
        """Check the values that the method gives.

        Raises:
            BlocksMisled: one is a tensor that only blocks may use.
        """
        self.check_operator(values, ())


def _is_random(node: fx.Node) -> bool:
    return is_random(node.target, node.args, node.kwargs)


def _takes_rows(args: Any, kwargs: Any) -> bool:
    """True for a call on rows that the data chooses, which are no tensors."""
    return any(isinstance(leaf, RowValue) for leaf in pytree.tree_leaves((args, kwargs)))
