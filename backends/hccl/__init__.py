"""HCCL: messages and collectives between Ascend NPUs, on streams.

In: calls of the ports in `../streams`. Out: calls of HCCL in C (`library.py`, `symbols.py`).
"""
