"""What programs measure of themselves: counts, times of executions and of instructions.

In: instructions and the ends of executions. Out: statistics and logs.
"""
