"""Log the torch functions that a traced call uses, so that another call can be compared with it.

Whatever Python does in a method, its graph follows from the torch functions that it calls: from
their order, their arguments, and torch's own settings. A call that uses the same functions on the
same arguments has the same graph, whatever else it has read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ....ir.location import Location
from ...torch_settings import settings_now
from ...values.operators import OperatorFunction, plain_operator

Form: TypeAlias = tuple[Any, ...]
"""The key of arguments: equal arguments have equal keys. A tensor is its number in the log."""


Numbers: TypeAlias = Callable[[Any], int | None]
"""Gives the number of a known tensor; None for anything else."""


class Unlike(BaseException):
    """A call is not like the one that was logged, or cannot be compared.

    Not an `Exception`, so that no handler in the user's code takes it for a failure.
    """


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One call of a torch function: its arguments, torch's settings and its result.

    `line` is the user's line of its operators, where it has issued any that a graph has.
    """

    function: Any
    arguments: Form
    settings: Form
    result: Any
    line: Location | None = None


class FunctionLog:
    """The torch functions that a call uses, in order.

    A log is `complete` if only these functions have made its tensors: another call that uses the
    same functions has the same graph. It is not complete if a function takes something that cannot
    be compared, such as a Python function. Nor is it if operators run that no torch function has
    called, as in a `torch.autograd.Function` or a scripted module.

    Attributes:
        mode: makes the fakes.
        state, inputs: the fakes of the call's state and of its inputs.
        entries: the functions.
        ends: what the call has returned and rebound, and torch's settings after it.
        complete: see above.
        busy: whether a function is running.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self.mode = mode
        self.state = state
        self.inputs = inputs
        self.entries: list[LogEntry] = []
        self.ends: Form = ()
        self.complete = True
        self.busy = False
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the same id
        self._numbers: dict[int, int] = {}
        self._depth = 0
        self._line: Location | None = None
        for tensor in (*state, *inputs):
            self._number(tensor)

    @staticmethod
    def restored(
        mode: FakeTensorMode,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        tensors: Iterable[torch.Tensor],
        entries: list[LogEntry],
        ends: Form,
    ) -> FunctionLog:
        """A complete log that another process has made.

        Args:
            mode, state, inputs, entries, ends: as the attributes.
            tensors: all its tensors, by number.
        """
        log = FunctionLog(mode, state, inputs)
        for tensor in tensors:
            log._number(tensor)
        log.entries, log.ends = entries, ends
        return log

    def begin(self) -> None:
        """Write down that the call begins."""
        self._depth = depth_of_modes()

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a torch function, and note it."""
        if not self.complete or self.busy or depth_of_modes() < self._depth:
            return function(*args, **kwargs)  # torch's own, while it has switched the trace off
        try:
            arguments = self.form_of_call(function, args, kwargs)
            settings = torch_settings(self._depth)
            if is_of_library(function) and _is_differentiated(args, kwargs):
                raise Unlike  # what torch records for it depends on more than the operator
        except Unlike:
            self.complete = False
            return function(*args, **kwargs)
        self.busy, self.complete = True, False  # unless it returns
        self._line = None
        try:
            result = function(*args, **kwargs)
        finally:
            self.busy = False
        self.complete = self._note_result(result)
        self.entries.append(LogEntry(function, arguments, settings, result, self._line))
        return result

    def note_operator(self) -> None:
        """Write down that an operator is issued."""
        self.complete &= self.busy

    def note_line(self, line: Location | None) -> None:
        """Write down the user's line of an operator."""
        self._line = line

    def note_end(self, values: Any) -> None:
        """Note the end of the call, and the values that it gives."""
        try:
            self.ends = self.form_of_end(values)
        except Unlike:
            self.complete = False
        self.complete = self.complete and not _has_python_backward(self._held)

    def form_of_end(self, values: Any) -> Form:
        """The key of a call's results; calls with the same results have equal keys.

        Raises:
            Unlike: a result cannot be compared.
        """
        return form_of(values, self.number_of), torch_settings(depth_of_modes())

    def form_of_call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
        """The key of a function's arguments; equal calls have equal keys.

        Raises:
            Unlike: an argument cannot be compared, or the function is not torch's own.
        """
        return form_of_call(function, args, kwargs, self.number_of)

    def number_of(self, value: Any) -> int | None:
        """The number of a known tensor; None for anything else."""
        return self._numbers.get(id(value))

    @property
    def count(self) -> int:
        """How many tensors have a number."""
        return len(self._held)

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor with this number."""
        return self._held[number]

    def fold(
        self, start: int, first: int, folded: LogEntry, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Replace all entries since `start` by one.

        Args:
            start: the index of the first entry to replace.
            first: the number of the first tensor that these entries have made.
            folded: the entry that replaces them.
            outputs: the tensors, of those that they have made, that stay known.
        """
        output_ids = {id(tensor) for tensor in outputs}
        for tensor in self._held[first:]:
            if id(tensor) not in output_ids:
                self._numbers.pop(id(tensor), None)
        self.entries[start:] = [folded]

    def _number(self, tensor: torch.Tensor) -> None:
        if self._numbers.setdefault(id(tensor), len(self._held)) == len(self._held):
            self._held.append(tensor)

    def _note_result(self, result: Any) -> bool:
        """Number the tensors of a result; False if it holds anything that the log cannot keep."""
        if isinstance(result, torch.Tensor):
            self._number(result)
            return True
        if isinstance(result, tuple) or type(result) is list:
            return all(self._note_result(part) for part in result)
        return type(result) in _EXACT or type(result) in (float, complex)


def form_of_call(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number_of: Numbers
) -> Form:
    """The key of a function's arguments; equal calls have equal keys.

    Args:
        function: the function.
        args, kwargs: its arguments.
        number_of: gives the numbers of tensors.

    Raises:
        Unlike: an argument cannot be compared, or the function is not torch's own.
    """
    if not _is_of_torch(function):
        raise Unlike
    positional = tuple([form_of(value, number_of) for value in args])
    return positional, tuple([(name, form_of(kwargs[name], number_of)) for name in kwargs])


def form_of(value: Any, number_of: Numbers) -> Any:
    """The key of an argument; equal arguments have equal keys.

    Raises:
        Unlike: it cannot be compared.
    """
    kind = type(value)
    if kind in _EXACT:
        return (kind, value)
    number = number_of(value)
    if number is not None:
        return number
    if kind is float or kind is complex:
        return (kind, repr(value))
    if kind is tuple or kind is list:
        return (kind, *[form_of(item, number_of) for item in value])
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return (kind, *[form_of(part, number_of) for part in parts])
    if kind is dict:
        pairs = [(form_of(key, number_of), form_of(value[key], number_of)) for key in value]
        return (kind, *pairs)
    if isinstance(value, (enum.Enum, pytree.TreeSpec)):
        return (kind, value)
    raise Unlike


def renumbered(form: Any, number: Callable[[int], int]) -> Any:
    """The form with other numbers for its tensors."""
    if type(form) is int:
        return number(form)
    kind, *parts = form
    if kind in (tuple, list, slice):
        return (kind, *[renumbered(part, number) for part in parts])
    if kind is dict:
        return (kind, *[(key, renumbered(value, number)) for key, value in parts])
    return form


class Rerun:
    """Follows the entries of a log while another call runs, and gives it the logged results.

    Args:
        entries: the entries of a traced call.
        number_of: gives the numbers of tensors.
        result_of: gives what the call gets for a logged result.
        see: is called for each entry that the call has come to, while its line runs.
        kernel: runs an operator of another library on fakes; its result has to be of the logged
            types. None: it is not asked.
    """

    def __init__(
        self,
        entries: Sequence[LogEntry],
        number_of: Numbers,
        result_of: Callable[[Any], Any] = lambda result: result,
        see: Callable[[LogEntry], None] = lambda entry: None,
        kernel: Callable[..., Any] | None = None,
    ) -> None:
        self._kernel = kernel
        self._next: Iterator[LogEntry] = iter(entries)
        self._number_of = number_of
        self._result_of = result_of
        self._see = see
        self._failed = False
        self._depth = depth_of_modes()

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The logged result of the function.

        Raises:
            Unlike: the function, its arguments or the settings differ from the log, or have
                differed before.
        """
        if depth_of_modes() < self._depth:
            return function(*args, **kwargs)  # torch's own, while it has switched the trace off
        entry = next(self._next, None)
        if self._failed or entry is None or entry.function != function:
            raise self.failure()
        try:
            arguments = form_of_call(function, args, kwargs, self._number_of)
            settings = torch_settings(self._depth)
        except Unlike:
            raise self.failure() from None
        if arguments != entry.arguments or settings != entry.settings:
            raise self.failure()
        self._see(entry)
        if function in _SETTERS:
            return function(*args, **kwargs)
        if self._kernel is not None and is_of_library(function):
            types = _types(self._kernel(function, args, kwargs))
            if types != _types(entry.result):
                raise self.failure()
        result = self._result_of(entry.result)
        return list(result) if type(result) is list else result

    def finish(self) -> None:
        """Check that the call has used all entries.

        Raises:
            Unlike: it has not, or it has differed before.
        """
        if self._failed or next(self._next, None) is not None:
            raise Unlike

    def failure(self) -> Unlike:
        """The exception to raise for a difference; every later function raises it, too."""
        self._failed = True
        return Unlike()


def _types(result: Any) -> list[tuple[Any, ...]]:
    """The types of the tensors of a result, in order, with what else a graph knows of them."""
    return [
        (value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
        if isinstance(value, torch.Tensor)
        else (type(value), value)
        for value in pytree.tree_leaves(result)
    ]


class OfGraph:
    """A function that, like one of torch, depends on its arguments and torch's settings alone."""


_EXACT = frozenset(
    {
        *(bool, int, str, bytes, type(None), type(Ellipsis), range, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Types of plain data whose equal values can replace each other."""

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _is_of_torch(function: Any) -> bool:
    """True if a function is one of torch's own, which depends on its arguments and settings alone.

    Functions of users can come through torch's modes as well. cg's own operators are like torch's.
    An operator of another library is known by its node, and `Rerun` asks its kernel for the type.
    """
    if isinstance(function, OfGraph):
        return True
    if isinstance(function, FunctionType):
        return str(function.__module__).partition(".")[0] == "torch"
    if isinstance(function, _OPERATORS):
        return not is_of_library(function) or plain_operator(function) is not None
    return callable(function) and type(function).__module__ == "builtins"


def is_of_library(function: Any) -> bool:
    """True if a function is an operator that is neither torch's nor cg's."""
    names = str(function).partition(".")[0]
    return isinstance(function, _OPERATORS) and names not in ("aten", "prims", "cg")


def _is_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ()
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _has_python_backward(tensors: Iterable[torch.Tensor]) -> bool:
    """True if the gradient of any tensor passes through Python, which may do anything."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not issubclass(
            node._forward_cls,  # type: ignore[attr-defined]
            OperatorFunction,
        ):
            return True
        pending += [following for following, _ in node.next_functions]
    return False


_SETTERS = (torch._C._set_grad_enabled,)
"""Functions that change a setting, and that reach a log: `torch.no_grad()` calls one."""


def depth_of_modes() -> int:
    """How many dispatch modes are active."""
    return int(torch._C._len_torch_dispatch_stack())


def torch_settings(depth: int) -> Form:
    """The settings that a torch function may depend on besides its arguments.

    Args:
        depth: how many dispatch modes belong to the trace.

    Raises:
        Unlike: the call has entered another dispatch mode, or has set hooks on the tensors that
            autograd saves, as a checkpoint does.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if depth_of_modes() != depth or hooks:
        raise Unlike
    return settings_now()
