"""CPU ranks: shared memory inside a machine, MPI between machines, executions that end together."""
