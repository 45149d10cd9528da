"""Communication on a device's streams: the common part of all libraries for it.

In: channels between devices, and a library: that of `../nccl` or `../hccl`. Out: their ports.
"""
