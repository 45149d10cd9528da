"""What a function of torch depends on beside its arguments and its settings: torch as it is here.

A function of torch may have been replaced, or an operator have got another kernel, by any package.
No key can hold what those do, so there is no key then.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import operator
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.library
import typing_extensions
from torch.backends import opt_einsum

from ...backends import fake
from ...tracer.torch_modes import default_device, default_dtype
from .source_digest import source_digest

_ROOT = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_ROOTS = (
    _ROOT,
    sysconfig.get_path("stdlib") + os.sep,
    typing_extensions.__file__,  # the wrapper of what torch calls deprecated
    os.path.dirname(fake.__file__) + os.sep,  # what the fake device adds
)
"""Where functions are that come with torch, Python or cg, whose versions say all about them."""

_FUNCTIONS = (
    "torch",
    "torch.functional",
    "torch._tensor",
    "torch._linalg_utils",
    "torch._lowrank",
    "torch._meta_registrations",
    "torch.nn.functional",
    "torch.nn.grad",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "torch.autograd",
    "torch.autograd.function",
    "torch.utils.checkpoint",
    "torch._C",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._C._special",
    "torch._C._VariableFunctions",
    "torch._decomp",
    "torch._decomp.decompositions",
    "torch._prims",
    "torch._prims_common",
    "torch._prims_common.wrappers",
    "torch._refs",
    "torch._refs._conversions",
    "torch._refs.fft",
    "torch._refs.linalg",
    "torch._refs.nn.functional",
    "torch._refs.special",
)
"""Modules whose functions run below the functions that a method calls."""
_CLASSES = ("Tensor", "TensorBase")
_OPERATORS = ("aten/", "prims/")


class Replaced(Exception):
    """A function or an operator of torch is not torch's own; the message says which."""


@dataclass(frozen=True, eq=False)
class _Namespace:
    """A module or a class as it was: its names, their values, and a line for each function."""

    name: str
    names: list[str]
    values: list[Any]
    lines: str


@dataclass(eq=False)
class TorchBuild:
    """The text of all that torch's functions depend on in this process.

    It takes milliseconds, and a tenth of that where no name of torch has another value since.
    Lines are written anew for the modules and classes alone that have changed.

    Attributes:
        variables: those that torch reads, as they were when it began: it sets some itself.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    _digest: str = ""
    _known: list[_Namespace] = field(default_factory=list)
    _kernels: frozenset[str] = frozenset()

    def text(self) -> str:
        """The text, as of now.

        Raises:
            Replaced: a function or an operator is not torch's own.
        """
        known = itertools.chain(self._known, itertools.repeat(None))
        spaces = [
            _namespace_now(*space, before) for space, before in zip(_spaces(), known, strict=False)
        ]
        if spaces != self._known:
            lines = "".join(space.lines for space in spaces)
            self._digest = hashlib.sha256(lines.encode()).hexdigest()
            self._known = spaces
        kernels = frozenset(torch.library._impls)
        if kernels != self._kernels:
            _check_kernels(kernels - self._kernels)
            self._kernels = kernels
        read = [f"{name}={text}" for name, text in sorted(self.variables.items())]
        return "\n".join([self._digest, *_surroundings(), *read])


def _namespace_now(name: str, members: Mapping[str, Any], before: _Namespace | None) -> _Namespace:
    """A space as it is; the one of before, if nothing in it has changed.

    Raises:
        Replaced: a function in it is not in torch's own files.
    """
    names, values = list(members), list(members.values())
    if (
        before is not None
        and (before.name, before.names) == (name, names)
        and _identical(values, before.values)
    ):
        return before
    return _Namespace(name, names, values, "".join(_members(name, members)))


def _identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _surroundings() -> list[str]:
    """The settings, and the machine, that torch has here."""
    return [
        _static_build(),
        str(default_dtype()),
        str(default_device()),
        str(torch.backends.mha.get_fastpath_enabled()),
        str((opt_einsum.is_available(), opt_einsum.enabled, opt_einsum.strategy)),
    ]


@functools.cache
def _static_build() -> str:
    """The part that a process cannot change."""
    texts = [source_digest(), torch.__version__, str(torch.version.git_version)]
    texts += [platform.machine(), torch.backends.cpu.get_cpu_capability(), sys.byteorder]
    texts.append(hashlib.sha256(torch.__config__.show().encode()).hexdigest())
    if torch.cuda.is_available():
        texts += [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability())]
        texts.append(str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
        # Without Triton, graphs for a device have no operators that are kernels of it.
        texts.append(str(importlib.util.find_spec("triton") is not None))
    return "\n".join(texts)


def _spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The modules and classes whose functions Python could replace, with their members."""
    for name in _FUNCTIONS:
        yield name, _names_in(name)
    for name in _CLASSES:
        for space in (torch, torch._C):
            cls = vars(space).get(name)
            if isinstance(cls, type):
                yield f"torch.{name}", vars(cls)


def _names_in(name: str) -> Mapping[str, Any]:
    """The members of a module, or of a part of `torch._C`, by name."""
    module: Any = sys.modules.get(name)
    if module is None and name.startswith("torch._C."):
        module = getattr(torch._C, name.rpartition(".")[2], None)
    if module is None or isinstance(module, ModuleType):
        return {} if module is None else vars(module)
    return {**vars(type(module)), **getattr(module, "__dict__", {})}


def _members(space: str, members: Mapping[str, Any]) -> Iterator[str]:
    """A line for each function of a space.

    Raises:
        Replaced: one is not in torch's own files.
    """
    for name, value in list(members.items()):
        kind = type(value)
        if kind is FunctionType:
            function: Any = value
            while type(function) is FunctionType:
                file = function.__code__.co_filename
                if not file.startswith(_ROOTS) and not _is_generated(function):
                    raise Replaced(f"{space}.{name} is a function of {file}")
                function = getattr(function, "__wrapped__", None)
            yield f"{space}.{name} {value.__module__}.{value.__qualname__}\n"
        elif callable(value) and kind is not type:
            own = getattr(value, "__name__", "")
            yield f"{space}.{name} {kind.__module__}.{kind.__qualname__} {own}\n"


def _is_generated(function: FunctionType) -> bool:
    """True if a function of torch's has code that torch has written, as for a data class."""
    return function.__code__.co_filename.startswith("<") and str(function.__module__).startswith(
        "torch."
    )


def _check_kernels(kernels: Iterable[str]) -> None:
    """Return if all kernels that Python has registered for torch's operators are torch's own.

    Args:
        kernels: those that Python has registered.

    Raises:
        Replaced: one is for an operator of torch, and not torch's own.
    """
    for key in kernels:
        if key.startswith(_OPERATORS) and key not in _known_kernels():
            operator, _, dispatch = key.rpartition("/")
            if not _is_torchs(operator.replace("/", "::"), dispatch):
                raise Replaced(f"the operator {operator} has a kernel for {dispatch} of another's")


@functools.cache
def _known_kernels() -> frozenset[str]:
    """The kernels that torch itself registers, by the objects that it does so with."""
    meta: Any = sys.modules.get("torch._meta_registrations")
    library = getattr(meta, "_meta_lib_dont_use_me_use_register_meta", None)
    return frozenset(getattr(library, "_op_impls", ()))


@functools.cache
def _is_torchs(operator: str, dispatch: str) -> bool:
    """True if a kernel was registered by torch itself, or for the fake device."""
    for line in torch._C._dispatch_dump(operator).splitlines():
        kind, _, where = line.partition(": registered at ")
        if where and kind.removesuffix("[alias]").strip() == dispatch:
            return where.startswith((*_ROOTS, "/dev/null"))
    return False
