"""A trace in progress: its module, its calls, and their arguments.

In: calls of methods and functions. Out: ops of the module, and declarations on which ranks agree.
"""
