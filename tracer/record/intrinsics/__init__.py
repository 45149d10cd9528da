"""Functions that a step may call beside methods of actors, from `cg.microbatches` to `cg.backward`.

In: values of the step. Out: ops, appended to the trace in progress.
"""
