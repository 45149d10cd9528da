"""Attention with dropout whose mask follows from a key and the indices of an entry."""
