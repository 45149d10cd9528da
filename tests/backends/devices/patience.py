"""How long a test waits for what has to come, and the device of tests."""

from __future__ import annotations

from cg.backends.fake.device import FakeDevice

PATIENCE = 120.0
"""Seconds after which a wait is a deadlock."""


def loose_device(index: int = 0, delay: float = 0.0) -> FakeDevice:
    """A fake device whose host waits only where it must: what is ordered wrongly shows."""
    return FakeDevice(index, delay, strict=False, patience=PATIENCE)
