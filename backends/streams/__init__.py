"""Communication on a device's streams: what all libraries for it have in common.

In: channels between devices, and a library: that of `../nccl` or `../hccl`. Out: their ports.
"""
