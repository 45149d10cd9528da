"""Keep traces and programs for the next start: files, their keys, and when they are written.

In: texts, with all that they depend on. Out: the texts of an earlier start with the same key.
Nothing is executed by reading them.
"""
