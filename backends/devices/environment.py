"""Environment variables that drivers of devices read, to be set before torch is imported.

This file imports nothing, so that it can be imported first.
"""

from __future__ import annotations

VARIABLES = {
    # Streams share the hardware's queues. A receive that waits in a queue holds up the work that
    # other streams have put behind it, so there are as many queues as possible.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""Values by name; a variable that the user has set keeps its value."""
