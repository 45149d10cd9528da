"""Trace one method: its graph of forward and backward, made by make_fx.

In: a method, the state of its actor and specs of its arguments. Out: a `Joint`.
"""
