"""Choose what forwards save for backwards, so that programs keep to a limit of memory.

In come a traced step, what each of its forwards may save against work, and limits of ranks; out
come limits of forwards.
"""
