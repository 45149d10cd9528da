"""CPU ranks: shared memory inside a machine, MPI between machines, executions that end together.

In: channels of the plan, and the processes' MPI. Out: ports (`communicator.py` chooses them, and
`queues/` has them), and executions that all ranks begin and end (`control/`).
"""
