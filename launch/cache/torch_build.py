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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
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
        if torch.library._impls != self._kernels:
            kernels = frozenset(torch.library._impls)
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
    return _Namespace(name, names, values, _members(name, members))


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
            if isinstance(cls, type) and not _is_immutable(cls):
                yield f"torch.{name}", vars(cls)


def _names_in(name: str) -> Mapping[str, Any]:
    """The members of a module, or of a part of `torch._C`, by name."""
    module: Any = sys.modules.get(name)
    if module is None and name.startswith("torch._C."):
        module = getattr(torch._C, name.rpartition(".")[2], None)
    if module is None or isinstance(module, ModuleType):
        return {} if module is None else vars(module)
    own = getattr(module, "__dict__", {})
    return own if _is_immutable(type(module)) else {**vars(type(module)), **own}


def _is_immutable(cls: type) -> bool:
    """True if a class takes no other functions than those that it was compiled with."""
    return bool(cls.__flags__ & _IMMUTABLE)


_IMMUTABLE = 1 << 8
"""The flag of such classes, Py_TPFLAGS_IMMUTABLETYPE in Python's `object.h`."""


def _members(space: str, members: Mapping[str, Any]) -> str:
    """The names of a space that stand for functions, and for which, if not for those of the name.

    Raises:
        Replaced: one is not in torch's own files.
    """
    python: list[str] = []
    compiled: list[str] = []
    others: list[str] = []
    for name, value in list(members.items()):
        kind: Any = type(value)
        if kind is FunctionType:
            _check_files(space, name, value)
            if value.__qualname__ == name and value.__module__ == space:
                python.append(name)
            else:
                others.append(f"{name} {value.__module__}.{value.__qualname__}")
        elif callable(value) and kind is not type:
            own = getattr(value, "__name__", "")
            if own == name and kind is BuiltinFunctionType:
                compiled.append(name)
            else:
                others.append(f"{name} {_name_of_kind(kind)} {own}")
    return "\n".join([space, " ".join(python), " ".join(compiled), *others, ""])


def _check_files(space: str, name: str, function: Any) -> None:
    """Return if a function, and all that it wraps, are in torch's own files.

    Raises:
        Replaced: one is not.
    """
    while type(function) is FunctionType:
        file = function.__code__.co_filename
        if not _is_of_torch(file) and not _is_generated(function):
            raise Replaced(f"{space}.{name} is a function of {file}")
        function = getattr(function, "__wrapped__", None)


@functools.cache
def _is_of_torch(file: str) -> bool:
    """True if a file is one of torch, Python or cg."""
    return file.startswith(_ROOTS)


@functools.cache
def _name_of_kind(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_generated(function: FunctionType) -> bool:
    """True if a function of torch's has code that torch has written, as for a data class."""
    return function.__code__.co_filename.startswith("<") and str(function.__module__).startswith(
        "torch."
    )


def _check_kernels(kernels: frozenset[str]) -> None:
    """Return if all kernels that Python has registered for torch's operators are torch's own.

    Args:
        kernels: those that Python has registered.

    Raises:
        Replaced: one is for an operator of torch, and not torch's own.
    """
    of_torch: dict[str, frozenset[str]] = {}
    for key in kernels - _known_kernels():
        if key.startswith(_OPERATORS):
            operator, _, dispatch = key.rpartition("/")
            if operator not in of_torch:
                of_torch[operator] = _of_torch(operator.replace("/", "::"))
            if dispatch not in of_torch[operator]:
                raise Replaced(f"the operator {operator} has a kernel for {dispatch} of another's")


@functools.cache
def _known_kernels() -> frozenset[str]:
    """The kernels that torch itself registers, by the objects that it does so with."""
    meta: Any = sys.modules.get("torch._meta_registrations")
    library = getattr(meta, "_meta_lib_dont_use_me_use_register_meta", None)
    return frozenset(getattr(library, "_op_impls", ()))


def _of_torch(operator: str) -> frozenset[str]:
    """The keys of an operator's kernels that torch itself has registered, or the fake device."""
    kernels: dict[str, bool] = {}
    for line in torch._C._dispatch_dump(operator).splitlines():
        kind, _, where = line.partition(": registered at ")
        if where:  # the first of a key is the one that runs
            key = kind.removesuffix("[alias]").strip()
            kernels.setdefault(key, where.startswith((*_ROOTS, "/dev/null")))
    return frozenset(key for key, is_torchs in kernels.items() if is_torchs)
