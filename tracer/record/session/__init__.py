"""A trace in progress: its module, its calls, the arguments that they take.

In: calls of methods and functions. Out: ops of the module, with declarations on which ranks agree.
"""
