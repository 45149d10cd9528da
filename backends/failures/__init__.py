"""Describe errors as data, carry them in place of values, and report them.

In: exceptions of ops. Out: poisons, flight records, and the words of `StepTimeout` and others.
"""
