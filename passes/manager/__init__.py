"""The pass manager, the names and options of passes, and the order in which they run.

In: a pipeline as text, and a module. Out: the rewritten module, checked, with dumps on request.
"""
