"""Start, follow and end a job: `python -m cg.launch`, and the part of the ranks in it.

In: a command line, or a launcher's variables. Out: processes that end together.
"""
