"""Count executions, and time them and their instructions.

In: instructions and the ends of executions. Out: statistics and logs.
"""
