"""Start a job, follow it, end it: `python -m cg.launch`, and what ranks do about their launcher.

In: a command line, or a launcher's variables. Out: processes that end together.
"""
