"""Find NCCL by the bindings that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..errors import TransportError
from ..streams.library import Library

Binding = Callable[[bool], Library]
"""Makes the library by one of its bindings; the argument is whether `connect` may return early.

Raises `ImportError` where the binding, or the library behind it, is not installed.
"""

BINDINGS = ("nccl4py", "cupy")
"""In the order in which they are tried."""


def load(binding: str | None = None, nonblocking: bool = False) -> Library:
    """The library, by the binding of a name, or by the first that is installed.

    Args:
        binding: one of `BINDINGS`; the first that can be loaded if None.
        nonblocking: whether the library's calls may return before they are done. CuPy's cannot.

    Bindings are imported here, since most machines have none.

    Raises:
        TransportError: none is installed; the message says what to install.
    """
    problems = []
    for name in BINDINGS if binding is None else (binding,):
        if name not in BINDINGS:
            raise TransportError(
                f"there is no binding of NCCL called '{name}'; known are {', '.join(BINDINGS)}"
            )
        try:
            module = importlib.import_module(f"{__package__}.{name}_binding")
            make: Binding = module.make
            return make(nonblocking)
        except (ImportError, RuntimeError, OSError) as error:
            problems.append(f"  {name}: {error}")
    raise TransportError(
        "tensors on GPUs travel by NCCL, and no binding of it can be loaded:\n"
        + "\n".join(problems)
        + "\nInstall one (pip install 'cg[cuda]'), or keep the step on the CPU by CG_DEVICE=cpu"
    )
