"""The sections of `benchmarks/gpu.py`, one a file."""
