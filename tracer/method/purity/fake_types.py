"""Let `type(x)` of a fake tensor give the type that it stands for, in the user's files.

`type(x) is torch.Tensor` and `{nn.Parameter: ...}[type(p)]` must take the branch that they take
when the step runs. A fake is of a class of its own, and nothing can change what `type` says of it.
So the name `type` means something else in the user's modules while a method is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_OWN = {"_kinds", "__mro_entries__"}
"""What a stand-in for `type` has itself; Python looks the second up in the object."""


class _Type:
    """Stands for `type`.

    Args:
        kinds: the type that a fake stands for, by the `id` of the fake; other fakes stand for a
            `torch.Tensor`.
    """

    def __init__(self, kinds: Mapping[int, type]) -> None:
        self._kinds = kinds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(*args, **kwargs)
        if len(args) != 1:
            return kind
        if issubclass(kind, FakeTensor):
            return self._kinds.get(id(args[0]), torch.Tensor)
        return self if kind is type else kind

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, type)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type,)

    def __getattribute__(self, name: str) -> Any:
        # Also what every object has: a metaclass of the user's calls `type.__new__`.
        return object.__getattribute__(self, name) if name in _OWN else getattr(type, name)

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __eq__(self, other: object) -> bool:
        return other is type or other is self

    def __hash__(self) -> int:
        return hash(type)

    def __repr__(self) -> str:
        return repr(type)


@contextmanager
def real_kinds(kinds: Mapping[int, type], spaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Let `type(x)` of a fake give its real type inside the `with` block.

    Args:
        kinds: the type that a fake stands for, by the `id` of the fake.
        spaces: the globals of the user's functions.
    """
    instead = _Type(kinds)
    spaces = [names for names in spaces if "type" not in names]
    try:
        for names in spaces:
            names["type"] = instead
        yield
    finally:
        for names in spaces:
            names.pop("type", None)
