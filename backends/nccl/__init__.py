"""NCCL: messages and collectives between the GPUs of NVIDIA, on streams.

In: calls of the ports in `../streams`. Out: calls of NCCL (`library.py`), by nccl4py.
"""
