"""What a step may call beside methods of actors: `cg.microbatches`, collectives, `cg.backward`, …

In: values of the step. Out: ops, appended to the trace in progress.
"""
