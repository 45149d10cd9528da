"""Read the environment: cg's variables, and the launcher that has started this process.

In: environment variables and ancestors in the process tree. Out: typed settings.
"""
