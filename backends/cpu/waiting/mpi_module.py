"""The mpi4py module of a communicator, which this package never imports itself."""

from __future__ import annotations

import sys
from typing import Any


def module_of(comm: Any) -> Any:
    """The module `mpi4py.MPI` that the class of `comm` comes from."""
    return sys.modules[type(comm).__module__]
