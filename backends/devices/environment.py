"""Environment variables that drivers of devices read, to be set before torch is imported.

This file imports nothing, so that it can be.
"""

from __future__ import annotations

VARIABLES = {
    # A kernel that is loaded when it is first launched may have to wait for all that the device is
    # doing: for a receive, too, whose message is only sent once that kernel has run.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share the queues of the hardware. A receive that waits in one holds up what other
    # streams have put behind it, so there are to be as many as there can be.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""By name; what the user has set stays."""
