"""The pass manager, the names and options of passes, and the order in which they run.

In: a pipeline as text. Out: passes that have run, with checks and dumps between them.
"""
