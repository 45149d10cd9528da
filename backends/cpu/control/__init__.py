"""Control of executions, which ranks begin, end, fail and restart together.

In: where this rank is. Out: where the others are, and the error that all raise.
"""
