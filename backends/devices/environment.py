"""Environment variables that drivers of devices read, to be set before torch is imported.

This file imports nothing, so that it can be.
"""

from __future__ import annotations

VARIABLES = {
    # Streams share the queues of the hardware. A receive that waits in one holds up what other
    # streams have put behind it, which costs time; so there are to be as many as there can be.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""By name; what the user has set stays."""
