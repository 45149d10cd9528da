"""The ranks of the job, as one of them sees them, and what they agree on.

In: the launcher's variables. Out: a world: rank, size, device, collective calls of the host.
"""
