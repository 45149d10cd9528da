"""Attention over a cut sequence: its forms, steps of a ring, and what a rank runs of its rows.

In: an op of attention whose sequence ranks have cut. Out: the ops that each rank runs, and the form
in which it gets keys of other ranks.
"""
