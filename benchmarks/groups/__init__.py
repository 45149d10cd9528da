"""Sections of `groups_gpu.py`: groups of ranks on devices, against the same work without cg."""
