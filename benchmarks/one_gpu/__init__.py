"""Sections of `benchmarks/one_gpu.py`, which compares one rank on one GPU with torch by hand."""
