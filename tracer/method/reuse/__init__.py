"""Use traces again: a method's for an actor that is alike, a layer's for the next layer.

In: the torch functions that a traced call has used, and a call to compare with it. Out: its graph,
with the state of the other call; or nothing, where anything is different.
"""
