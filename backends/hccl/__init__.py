"""HCCL: messages and collectives between Ascend NPUs, on streams."""
