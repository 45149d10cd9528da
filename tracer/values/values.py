"""Stand-ins of a step's Python for values that exist only when the step runs.

A tensor of the step is a `TracedTensor`: a real `torch.Tensor` subclass without storage, so that
`isinstance` and shapes behave. An object is an `ObjectValue`. Both carry a `Traced`, which links
them to the IR.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...ir.ops import Value
from ...ir.types import Place
from ..errors import TraceError
from ..source import caller_location
from .specs import ObjectSpec, TensorSpec


class ObjectMarker:
    """Stands for an argument of a step that is a Python object known only at run time."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "cg.object"

    def __reduce__(self) -> str:
        return "OBJECT"


class NotAValue:
    """Base of objects that a step may hold, but neither pass on nor return: handles of actors."""

    __slots__ = ()

    what_it_is = ""


OBJECT = ObjectMarker()
"""The one `ObjectMarker`; users know it as `cg.object`."""


IN_A_METHOD = "do it in an actor's method that takes the object"


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that several values of the step may share when it runs.

    Attributes:
        members: the values that share it, as far as Python still holds them.
        pinned: who else holds it, if a write to it would be seen outside the trace.
        actor: the actor whose parameters or buffers it is, if any.
        writes: how often that actor had been written to when the value was read.
        state: the paths of the parameters and buffers that it may be.
    """

    members: list[weakref.ref[Any]] = field(default_factory=list)
    pinned: str | None = None
    actor: str | None = None
    writes: int = 0
    state: frozenset[str] = frozenset()

    def others(self, value: TracedTensor) -> bool:
        """True if Python still holds another value that shares this memory."""
        held = (member() for member in self.members)
        return any(other is not None and other is not value for other in held)


class RecordingSession(Protocol):
    """The methods of a session that the values it has made call."""

    def remedy_for_parts(self, value: Value) -> str: ...
    def remedy_for_tensors(self, value: Value) -> str: ...


@dataclass(eq=False, slots=True)
class Traced:
    """Record of a value that the step's Python holds.

    Attributes:
        trace: the session that made it.
        value: its name and type in the IR.
        spec: its dtype, shape, and whether gradients flow through it.
        order: counts the values of the step in the order in which they were made.
        storage: the memory that it may share with other values; None while it is alone.
    """

    trace: RecordingSession
    value: Value
    spec: TensorSpec | ObjectSpec
    order: int
    storage: Storage | None = None

    @property
    def place(self) -> Place:
        """The ranks that hold it."""
        place = self.value.type.place
        assert place is not None, "every value of a trace has a place"
        return place


class TracedTensor(torch.Tensor):
    """A tensor of the step that is being traced: dtype and shape, but no elements."""

    traced: Traced

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise escaped(f"{func} was called on")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if torch._C._is_torch_function_mode_enabled():
            return _REPR(self)  # which the recorder refuses
        return f"<value %{self.traced.value.name} of a traced step: {self.traced.value.type}>"


_REPR: Callable[[torch.Tensor], str] = torch.Tensor.__repr__
_WRAP = torch.Tensor._make_wrapper_subclass
_CPU = torch.device("cpu")


def make_tensor(traced: Traced, spec: TensorSpec) -> TracedTensor:
    """A tensor for the step's Python to hold."""
    tensor: TracedTensor = _WRAP(
        TracedTensor, spec.shape, dtype=spec.dtype, device=_CPU, requires_grad=spec.requires_grad
    )
    tensor.traced = traced
    return tensor


_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def is_consistent(tensor: TracedTensor) -> bool:
    """True if the tensor's `requires_grad` is still that of the trace.

    A `torch.autograd.Function` changes it, since it works on tensors behind the tracer's back. Call
    this where torch functions are not intercepted.
    """
    spec = tensor.traced.spec
    return isinstance(spec, TensorSpec) and spec.requires_grad == _REQUIRES_GRAD(tensor)


def share(one: TracedTensor, other: TracedTensor) -> Storage:
    """Write down that two values may share memory, and return the record of that memory."""
    storage, merged = storage_of(one), storage_of(other)
    if storage is merged:
        return storage
    for member in merged.members:
        held = member()
        if held is not None:
            held.traced.storage = storage
            storage.members.append(member)
    storage.pinned = storage.pinned or merged.pinned
    if storage.actor is None:
        storage.actor, storage.writes = merged.actor, merged.writes
    storage.state |= merged.state
    return storage


def storage_of(tensor: TracedTensor) -> Storage:
    """Return the record of a value's memory; make it if there is none yet."""
    traced = tensor.traced
    if traced.storage is None:
        traced.storage = Storage([weakref.ref(tensor)])
    return traced.storage


class StaleValue(TraceError):
    """A step that is traced a second time uses a value of its first trace."""


def escaped(use: str) -> TraceError:
    """The error for a value that is used outside of the trace that made it."""
    return TraceError(
        f"{use} a value of a traced step, outside of that step",
        loc=caller_location(),
        remedy="return it from the step: what the step returns is real when the step has run",
    )


def _refused(use: str) -> Callable[..., NoReturn]:
    """A method of `ObjectValue` that refuses a use of the object, such as a copy."""

    def refuse(self: ObjectValue, *args: object) -> NoReturn:
        self._unknown(use)

    return refuse


class ObjectValue:
    """A Python object that exists only when the step runs; a step can only hand it on."""

    __slots__ = ("__weakref__", "traced")

    def __init__(self, traced: Traced) -> None:
        self.traced = traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        leaves = (*tree_leaves(args), *tree_leaves(kwargs or {}))
        value = next(leaf for leaf in leaves if isinstance(leaf, cls))
        raise TraceError(
            f"torch.{getattr(func, '__name__', func)} of %{value.traced.value.name}, an object "
            "that is known only when the step runs",
            loc=caller_location(),
            remedy="say that the method returns tensors, by @cg.opaque(fake=...), or compute with "
            "the object in an actor's method",
        )

    def __repr__(self) -> str:
        return f"<value %{self.traced.value.name} of a traced step: {self.traced.value.type}>"

    def _unknown(self, use: str, remedy: str = IN_A_METHOD) -> NoReturn:
        raise TraceError(
            f"{use} %{self.traced.value.name}, an object that is known only when the step runs",
            loc=caller_location(),
            remedy=remedy,
        )

    def refuse_as_tensor(self, use: str) -> NoReturn:
        """Refuse to use the object as a tensor, and say why it is an object."""
        self._unknown(use, self.traced.trace.remedy_for_tensors(self.traced.value))

    def _no_parts(self, use: str) -> NoReturn:
        self._unknown(use, self.traced.trace.remedy_for_parts(self.traced.value))

    def __iter__(self) -> NoReturn:
        self._no_parts("iteration over")

    def __getitem__(self, key: object) -> NoReturn:
        self._no_parts("an element of")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocols that ask what an object can do
        self._no_parts(f"attribute '{name}' of")

    __reduce_ex__: Any = _refused("a copy of")
    __bool__: Any = _refused("a decision on")
    __len__: Any = _refused("the length of")
    __contains__: Any = _refused("a search in")
    __setitem__: Any = _refused("a write to")
    __call__: Any = _refused("a call of")
    __str__: Any = _refused("the text of")
    __format__: Any = _refused("the text of")
    __eq__: Any = _refused("a comparison with")
    __ne__: Any = _refused("a comparison with")
    __hash__ = object.__hash__

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused("arithmetic with")
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = __matmul__ = __neg__ = __add__
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __add__
