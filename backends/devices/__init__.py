"""Accelerators: what a rank's program needs of one, and those that torch drives."""
