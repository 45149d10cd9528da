"""Actors, their handles, and the state that they hold and share.

In: a user's class, and its instances. Out: handles, and the tensors and objects that an actor
reaches.
"""
