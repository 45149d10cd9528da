"""The parts of `docs/generate.py`."""
