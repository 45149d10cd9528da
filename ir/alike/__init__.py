"""Programs that are alike: those of ranks that differ in names, peers and regions alone.

In: the programs of a scheduled module. Out: one program for each group of ranks, and for each rank
what tells its program from that one.
"""
