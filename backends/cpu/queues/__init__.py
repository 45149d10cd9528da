"""Channels of host ranks: shared memory inside a machine, MPI between machines, and their ports.

In: a channel of the plan. Out: the ports of `send`, `recv` and the collectives.
"""
