"""The mpi4py module of a communicator: this package is given communicators, and imports none."""

from __future__ import annotations

import sys
from typing import Any


def module_of(comm: Any) -> Any:
    """The module `mpi4py.MPI` that the class of `comm` comes from."""
    return sys.modules[type(comm).__module__]
