"""What becomes of an error: described as data, carried in place of values, reported.

In: exceptions of ops. Out: poisons, flight records, and the words of `StepTimeout` and others.
"""
