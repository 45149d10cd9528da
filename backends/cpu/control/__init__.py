"""What the ranks of a machine tell each other about executions: begin, end, error, restart.

In: where this rank is. Out: where the others are, and the error that all raise.
"""
