"""Say what a device that has failed was most likely doing, and why.

A kernel that is given an index out of range stops its device for good. The host learns of it by
whatever it asks of the device next, in another method or in the caller's program. The device
answers no question about the kernel any more: on an H100 with torch 2.11 every event then raises
the same error, even one that the device had passed long before. The host knows the work that it had
put on the device, and which of its methods use indices, at which lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from ...ir.location import Location
from ...ir.ops import Call, Op
from ...ir.ops.module import FunctionKind, Module
from ..base import Body, GraphBody
from .flight import method_of

ASSERTED: Final = "device-side assert"
_ASTRAY: Final = "illegal memory access"
_FATAL: Final = (
    *(ASSERTED, _ASTRAY, "misaligned address", "unspecified launch failure"),
    *("illegal instruction", "invalid program counter", "hardware stack error"),
    *("uncorrectable", "launch timed out", "aicore exception", "vector core exception"),
)
"""Words of the errors of CUDA, HIP and CANN after which a device does nothing any more."""

_ADVICE: Final = "to enable device-side assertions"
"""Words of torch's advice, which is part of every error of CUDA, whatever its cause."""

_CAUSES: Final = {
    ASSERTED: (
        "The likely cause: an index is out of range, of an embedding or a gather, or as a target "
        "of cross entropy beyond the number of classes."
    ),
    _ASTRAY: (
        "The likely cause: a kernel has used memory that is not its tensor's. Kernels that check "
        "no index do that with one out of range, as those of Triton and of extensions may."
    ),
}

REMEDY = (
    "The lines of the kernels themselves, where there are any, stand above. To see the method fail "
    "at its own line, run the same step on hosts, with CG_DEVICE=cpu: torch checks each index "
    "there"
)

MOST = 12
"""The most uses of indices that a message names."""


class DeviceFault(RuntimeError):
    """A device has failed, and does nothing any more; the message is all that is known of it."""


def fault_in(error: BaseException) -> BaseException | None:
    """The error by which a device has failed, if it stands behind `error`; else None.

    The error of another rank's device comes as a `RemoteError`, and does not count.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if type(at) in (RuntimeError, torch.AcceleratorError) and _words(at, _FATAL):
            return at
        at = at.__cause__ or at.__context__
    return None


def first_line(error: BaseException) -> str:
    """The message of an error, without torch's advice on how to find its cause."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def cause_of(error: BaseException) -> str:
    """The likely cause of a device's failure, in words; "" if nothing but its text is known."""
    return next((_CAUSES[words] for words in _words(error, _CAUSES)), "")


def _words(error: BaseException, among: Iterable[str]) -> list[str]:
    """Those words that the message of an error has, apart from torch's advice."""
    text = str(error).replace(_ADVICE, "")
    return [words for words in among if words in text]


# -- uses of indices ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexUse:
    """A place of a method that takes indices.

    Attributes:
        words: the op, in words.
        sizes: the sizes of the dimensions that are indexed, as far as they are known.
        location: the user's line.
    """

    words: str
    sizes: tuple[int, ...]
    location: Location | None

    def __str__(self) -> str:
        at = "" if self.location is None else f" at {self.location}"
        within = " and ".join(f"0 to {size - 1}" for size in self.sizes)
        return f"{self.words}{at}" + (f": it takes {within}" if within else "")


_Sizes = Callable[[fx.Node], tuple[int, ...]]


def _shape(value: Any) -> tuple[int, ...]:
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(fake.shape) if isinstance(fake, torch.Tensor) else ()


def _rows(node: fx.Node) -> tuple[int, ...]:
    return _shape(node.args[0])[:1]


def _along_dim(node: fx.Node) -> tuple[int, ...]:
    shape, dim = _shape(node.args[0]), node.args[1]
    return (shape[dim],) if isinstance(dim, int) and -len(shape) <= dim < len(shape) else ()


def _by_list(node: fx.Node) -> tuple[int, ...]:
    shape, indices = _shape(node.args[0]), node.args[1]
    if not isinstance(indices, Sequence):
        return ()
    pairs = zip(shape, indices, strict=False)
    return tuple(dict.fromkeys(size for size, index in pairs if index is not None))


def _classes(node: fx.Node) -> tuple[int, ...]:
    shape = _shape(node.args[0])
    return shape[1:2] if len(shape) > 1 else shape


_ATEN = torch.ops.aten
_USES: Final[Mapping[Any, tuple[str, _Sizes]]] = {
    _ATEN.embedding: ("an embedding", _rows),
    _ATEN._embedding_bag: ("an embedding bag", _rows),
    _ATEN._embedding_bag_forward_only: ("an embedding bag", _rows),
    _ATEN.nll_loss_forward: ("targets of cross entropy", _classes),
    _ATEN.nll_loss2d_forward: ("targets of cross entropy", _classes),
    _ATEN.gather: ("gather", _along_dim),
    _ATEN.index_select: ("index_select", _along_dim),
    **dict.fromkeys(
        (_ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_),
        ("scatter", _along_dim),
    ),
    **dict.fromkeys((_ATEN.scatter_reduce, _ATEN.scatter_reduce_), ("scatter", _along_dim)),
    **dict.fromkeys((_ATEN.index_add, _ATEN.index_add_), ("index_add", _along_dim)),
    **dict.fromkeys((_ATEN.index_copy, _ATEN.index_copy_), ("index_copy", _along_dim)),
    **dict.fromkeys((_ATEN.index_fill, _ATEN.index_fill_), ("index_fill", _along_dim)),
    **dict.fromkeys((_ATEN.index, _ATEN._unsafe_index), ("indexing", _by_list)),
    **dict.fromkeys(
        (_ATEN.index_put, _ATEN.index_put_, _ATEN._unsafe_index_put, _ATEN._index_put_impl_),
        ("assignment to indices", _by_list),
    ),
}
"""Ops that fail by an index, in words, and the sizes that they index. A backward uses the indices
of its forward, which has come before it."""


def index_uses(body: Body) -> list[IndexUse]:
    """The uses of indices in a traced function, fused or not, in their order."""
    if not isinstance(body, GraphBody):
        return []
    uses = []
    graph, lines = body.graph_and_lines()
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            use = _USES.get(node.target.overloadpacket)
            if use is not None:
                name, sizes = use
                uses.append(IndexUse(name, sizes(node), lines.get(node)))
    return list(dict.fromkeys(uses))


def suspects(ops: Sequence[Op], module: Module, bodies: Mapping[str, Body]) -> list[str]:
    """Describe the methods that use indices, among those that some ops call, in their order.

    A method that is called several times, as for each microbatch and by its backward, is listed
    once.
    """
    lines: list[str] = []
    hidden: dict[str, None] = {}
    known: set[tuple[str | None, str]] = set()
    named = left = 0
    for op in ops:
        if not isinstance(op, Call) or (method := method_of(op, module)) in known:
            continue
        function = module.functions[op.fn.name]
        name = ".".join(filter(None, method))
        if function.kind is FunctionKind.OPAQUE:
            hidden[name] = None
        uses = index_uses(bodies[function.body_name]) if function.body_name in bodies else []
        if not uses:
            continue
        known.add(method)
        shown = uses[: max(MOST - named, 0)]
        named, left = named + len(shown), left + len(uses) - len(shown)
        if shown:
            at = "" if function.loc is None else f" ({function.loc.file}:{function.loc.line})"
            called = "" if op.loc is None else f", called at {op.loc}"
            lines += [f"  {name}{at}{called}", *(f"    {use}" for use in shown)]
    if left:
        lines.append(f"  and {left} uses of indices more")
    if hidden:
        lines.append(f"  opaque methods, whose ops are not known: {', '.join(hidden)}")
    return lines
