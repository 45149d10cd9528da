"""Bind a rank's linear program, and run it.

In: a program with its bodies, constants and communicators. Out: instructions over registers, and
what the program returns.
"""
