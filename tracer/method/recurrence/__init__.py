"""Recurrent layers and CTC as a few operators of cg each, whatever the number of time steps.

In: torch's functions of recurrent layers, of cells and of CTC, as a method calls them. Out:
operators of cg that loop over the steps when they run, and their gradients.
"""
