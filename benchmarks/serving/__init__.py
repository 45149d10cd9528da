"""Benchmarks of serving: the engine alone, a slow link, and the server as a whole."""
