"""Conversions: how the tensors of a model are made up of those that its library stores.

In: a model, and the names and shapes in its files. Out: for each of its tensors the parts of stored
tensors that it consists of, by which ranks read and write their pieces.
"""
