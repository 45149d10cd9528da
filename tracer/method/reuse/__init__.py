"""Use traces again: that of a method for an actor that is alike, that of a layer for the next.

In: the torch functions that a traced call has used, and a call to compare with it. Out: its graph,
with the state of the other call; or nothing, where anything is different.
"""
