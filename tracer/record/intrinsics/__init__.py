"""Functions of cg that a step may call, from `cg.microbatches` to `cg.backward`.

In: values of the step. Out: ops, appended to the trace in progress.
"""
