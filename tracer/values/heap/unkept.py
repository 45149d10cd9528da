"""An object that stands in an attribute for a tensor which a step has not kept there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import TraceError


class UnkeptTensor:
    """Stands for the tensor that a traced method has stored in an attribute of a library's object.

    Layers of a library keep their last state for a later call, and training never reads it: it is
    written again first. Eager Python leaves the tensor there, with the graph behind it. A step
    leaves this object there, which may be replaced, and compared with None. Whatever else is done
    with it raises.

    Args:
        path: of the attribute, from the actor.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<a tensor that a step has not kept in '{self.path}'>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copies and pickles ask for these
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        values = (*args, *(kwargs or {}).values())
        first: UnkeptTensor = next(value for value in values if isinstance(value, UnkeptTensor))
        first._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise TraceError(
            f"'{self.path}' is read, and a traced method has stored a tensor there, which its step "
            "has not kept",
            remedy="let the method return the tensor, and hand it on in the step; or set the "
            "attribute back to None before it is read",
        )


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(self: UnkeptTensor, *_: object) -> NoReturn:
        self._refuse()

    operator.__name__ = name
    return operator


_OPERATORS = (
    "bool len iter getitem setitem contains float int index complex array format "
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv matmul rmatmul pow rpow "
    "neg abs invert and rand or ror xor rxor mod rmod floordiv rfloordiv eq ne lt le gt ge"
)
for _name in _OPERATORS.split():
    setattr(UnkeptTensor, f"__{_name}__", _refused(f"__{_name}__"))
UnkeptTensor.__hash__ = object.__hash__  # type: ignore[method-assign]  # lost with __eq__
