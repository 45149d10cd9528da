"""Graphs that one rank drives: `execute` on the driver, `serve` on the others.

In: arguments on the driver. Out: futures; several executions may be in flight.
"""
