"""Dispatch modes between a traced call and torch, which refuse what a graph cannot keep.

`FunctionGuard` sees torch functions as the user writes them; `OpRecorder` sees every operator that
reaches the graph. Together they turn each silent loss of tracing into an error with a line, and
note the mutations, random draws and source lines of what they let through.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ....ir.location import Location
from ...error_translation import OPAQUE_REMEDY, current_location, refusal_here
from ...errors import TraceError, note_refusal
from ...function_runs import Run
from ...source import is_torch_file
from ...values.operators import is_random, storage_key, writes_in_secret, written_values
from ..assertions.assertions import asserted
from ..constants.constant_values import LIFTS, ConstantValues
from ..experts.expert_products import static_form
from ..replaced.strided import REMEDY, WITH_OFFSET, OffsetError, from_first_element
from ..rows.row_programs import UNHANDLED, RowPrograms
from .function_log import FunctionLog
from .op_log import OpLog
from .randomness import count_draw
from .repeated_draws import Draws
from .watch import UsesGradients

BUFFER_REMEDY = (
    "register it as a buffer of the actor, keep it in an attribute, pass it as an argument, or "
    "build it inside the method from Python numbers"
)
CLONE_REMEDY = "values of a step are immutable: work on a copy (x = x.clone()), or use x = x + y"


def nothing_to_check(args: Iterable[Any], written: Iterable[Any]) -> None:
    """The `check` of an `OpRecorder` that checks nothing."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each operator of a traced call does, and refuses what would be lost.

    Attributes:
        shown: the call in words.
        inputs: the name of each input value for messages, by storage.
        state: storages of the actor's state.
        written: storages of the state that were written to.
        locations: the user's line of each node, by name.
        log: the operators of the forward, in order.
        functions: the torch functions that call these operators.
        draws: whether random numbers were drawn.
        secret: results of operators that write in secret; returning them keeps them alive.
        backward: whether the backward is being traced now.
        backward_of_block: whether it is that of a block, inside of the line that calls the block.
        backward_writes: storages of the state that the backward wrote to.
        constants: the tensors that follow from no input.
        check: is called with the arguments of each operator, and with those that it writes to.
    """

    def __init__(
        self,
        shown: str,
        inputs: dict[int | None, str],
        state: frozenset[int | None],
        log: OpLog,
        functions: FunctionLog,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shown = shown
        self.functions = functions
        self.inputs = inputs
        self.state = state
        self.log = log
        self.written: set[int | None] = set()
        self.backward_writes: set[int | None] = set()
        self.constants = ConstantValues()
        self.locations: dict[str, Location] = {}
        self.draws = False
        self.secret: list[torch.Tensor] = []
        self.backward = False
        self.backward_of_block = False
        self.check: Callable[[Iterable[Any], Iterable[Any]], None] = nothing_to_check
        self._lines: dict[tuple[str, int], Location] = {}
        self._by_sequence: dict[int, Location] = {}
        self._drawn = Draws()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Torch functions have their modes off here in the forward; the backward has them on.
        with torch._C.DisableTorchFunction():
            return self._note(func, args, kwargs or {})

    def _note(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        func, args, kwargs = self.constants.static_form(*static_form(func, args, kwargs))
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func in WITH_OFFSET:
            func, args, kwargs = self._from_first_element(func, args, kwargs)
        written = list(written_values(func, args, kwargs))
        if not self.backward:
            self.functions.note_operator()
            self.check(_flat((*args, *kwargs.values())), written)
        self._refuse_generators(func, args, kwargs)
        self._refuse_foreign_tensors(func, args, kwargs)
        self.note_writes(func, written)
        nodes = nodes_so_far()
        # Finding lines takes time. A second run, which makes no graph, uses those of the first.
        location = None if nodes is None else self._location()
        if not self.backward:
            self.log.note(func, args, kwargs, location)
            self.functions.note_line(location)
        before = 0 if nodes is None else len(nodes)
        try:
            result = self._run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            note_refusal(error)
            raise
        self.constants.note(func, args, kwargs, result, written)
        if location is not None:
            for node in itertools.islice(reversed(nodes), len(nodes) - before):
                self.locations[node.name] = location
        if writes_in_secret(func, args, kwargs):
            self.secret.append(result[0])
        return result

    def _from_first_element(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        key = storage_key(args[0])
        name = self.inputs.get(key, "a tensor of the actor" if key in self.state else None)
        try:
            return from_first_element(func, args, kwargs, name, self._note)
        except OffsetError as error:
            raise self._error(str(error), REMEDY) from None

    def _refuse_generators(self, func: object, args: Any, kwargs: Any) -> None:
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise self._error(
                f"{func} takes a torch.Generator, whose state a traced method cannot keep",
                "leave the generator out: a step seeds every call by itself, reproducibly",
            )

    def _refuse_foreign_tensors(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.name in LIFTS:
            return
        for value in _flat((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                raise self._error(
                    f"it uses a tensor ({value.dtype}, shape {tuple(value.shape)}) that is neither "
                    "an argument nor part of the actor: a graph would keep today's values forever",
                    BUFFER_REMEDY,
                )

    def _run(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Call an operator. A draw of the backward gives what the forward has drawn."""
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        number = count_draw()
        if self.backward:
            result = self._drawn.again(number, func, args, kwargs)
            if result is None:
                raise self._error(
                    f"its backward draws random numbers ({func}) that its forward has not drawn, "
                    "as a checkpoint with preserve_rng_state=False does",
                    "leave preserve_rng_state as it is by default: True",
                )
            return result
        self.draws = True
        result = func(*args, **kwargs)
        self._drawn.note(number, func, result)
        return result

    def note_writes(self, func: object, written: Iterable[Any]) -> None:
        """Note what a function writes to.

        Raises:
            TraceError: they are values of the step, which are immutable.
        """
        for value in written:
            if not isinstance(value, torch.Tensor):
                continue
            key = storage_key(value)
            self.constants.note_write(key)
            if key is None:
                continue
            self._drawn.note_write(key)
            if key in self.inputs:
                raise self._error(
                    f"it writes in place to {self.inputs[key]} ({func})", CLONE_REMEDY
                )
            if key in self.state:
                (self.backward_writes if self.backward else self.written).add(key)

    def _location(self) -> Location | None:
        location, _ = current_location()
        if self.backward:
            node = torch._C._current_autograd_node()
            if (location is None or self.backward_of_block) and node is not None:
                return self._by_sequence.get(node._sequence_nr())
            return location
        if location is not None:
            location = self._lines.setdefault((location.file, location.line), location)
            self._by_sequence[torch._C._autograd._get_sequence_nr() - 1] = location
        return location

    def _error(self, reason: str, remedy: str) -> TraceError:
        return refusal_here(self.shown, reason, remedy)


def nodes_so_far() -> Any:
    """The nodes of the graph that make_fx is making; None if it makes none."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph.nodes


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


class FunctionGuard(TorchFunctionMode):
    """Refuses torch functions that take values out of tensors, and spots work on gradients.

    Args:
        shown: the call in words.
        run: runs all other functions.
        rows: answers those that have to do with rows that the data chooses.
    """

    def __init__(self, shown: str, run: Run, rows: RowPrograms | None = None) -> None:
        super().__init__()
        self.shown = shown
        self.run = run
        self._rows = rows or RowPrograms()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _GRADIENT_WORK:
            raise UsesGradients(f"it uses {_GRADIENT_WORK[func]}")
        if func in (_T.data_ptr, _T.storage_offset) and is_torch_file(
            sys._getframe(1).f_code.co_filename
        ):
            # Torch's own modules ask whether weights lie side by side.
            return 0 if func == _T.data_ptr else self.run(func, args, kwargs or {})
        rows = self._rows.answer(func, args, kwargs or {}, self.run)
        if rows is not UNHANDLED:
            return rows
        if func in _REFUSED:
            answer = asserted(func, args, sys._getframe(1), self.run)
            if answer is not None:
                return answer
            reason, remedy = _REFUSED[func]
            if sys._getframe(1).f_code.co_filename.startswith(_DISTRIBUTIONS):
                remedy = "pass validate_args=False to the distribution, which checks values; else "
                remedy += OPAQUE_REMEDY
            raise refusal_here(self.shown, reason, remedy)
        return self.run(func, args, kwargs or {})


def run_noted(function: Any, args: Sequence[Any]) -> Any:
    """Call a function; a method that is traced, or compared with a trace, notes it."""
    count = torch._C._len_torch_function_stack()
    guard: Any = torch._C._get_function_stack_at(count - 1) if count else None
    if isinstance(guard, FunctionGuard):
        return guard.run(function, args, {})
    return function(*args)


_DISTRIBUTIONS = os.path.join(os.path.dirname(torch.__file__), "distributions") + os.sep
_T = torch.Tensor
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_GRADIENT_WORK: dict[Any, str] = {
    _GRAD.__get__: "Tensor.grad",
    _GRAD.__set__: "Tensor.grad",
    _GRAD.__delete__: "Tensor.grad",
    _T.backward: "Tensor.backward",
    torch.autograd.backward: "torch.autograd.backward",
}


def _takes_value(how: str) -> tuple[str, str]:
    return f"{how} needs the value of a tensor, which is not known while tracing", OPAQUE_REMEDY


_NUMBER_REMEDY = (
    f"{OPAQUE_REMEDY}. Where it is a bound, such as the longest length in max_q of varlen_attn, "
    "give a number that is never exceeded, such as the number of tokens"
)


_SHOWS = (
    "it prints or formats a tensor, whose value is not known while tracing",
    "print its shape and dtype, return the tensor and print it outside the step, or mark the "
    "method with @cg.opaque",
)
_ADDRESS = (
    "it takes the address of a tensor, which changes from one execution to the next",
    OPAQUE_REMEDY,
)
_REFUSED: dict[Any, tuple[str, str]] = {
    _T.item: (_takes_value("Tensor.item() or Tensor.tolist()")[0], _NUMBER_REMEDY),
    _T.tolist: _takes_value("Tensor.item() or Tensor.tolist()"),
    _T.__bool__: (
        "a Python condition (if, while, assert, and, or, not) depends on the value of a tensor, "
        "which is not known while tracing",
        "use torch.where, decide by a static (plain Python) value, or mark the method with "
        "@cg.opaque",
    ),
    _T.__int__: (_takes_value("int(tensor)")[0], _NUMBER_REMEDY),
    _T.__float__: _takes_value("float(tensor)"),
    _T.__complex__: _takes_value("complex(tensor)"),
    _T.__index__: _takes_value("a tensor as a Python index"),
    _T.__contains__: _takes_value("`in` on a tensor"),
    _T.numpy: _takes_value("Tensor.numpy()"),
    _T.__array__: _takes_value("a NumPy function of a tensor"),
    _T.__repr__: _SHOWS,
    _T.__format__: _SHOWS,
    _T.data_ptr: _ADDRESS,
    _T.storage_offset: (
        "it asks where in its memory a tensor begins, which may be elsewhere when the step runs",
        "leave it out: as_strided without an offset begins with the tensor's first element",
    ),
    _DATA.__set__: (
        "it sets Tensor.data",
        "copy into the tensor under torch.no_grad() (p.copy_(...)), or mark the method with "
        "@cg.opaque",
    ),
}
