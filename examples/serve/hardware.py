"""The hardware of all ranks of a job, measured and brought together."""

from __future__ import annotations

import socket

import cg

from .defaults import Hardware, measure
from .stage_graphs import own_device


def rank_hardware() -> Hardware:
    """The least hardware of a rank; collective.

    Raises:
        ValueError: their devices are not of one kind.
    """
    device = own_device()
    machines = cg.allgather(socket.gethostname())
    own = measure(None if device.type == "cpu" else device, machines.count(machines[cg.rank()]))
    return Hardware.least(cg.allgather(own))
