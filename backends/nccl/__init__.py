"""NCCL: messages and collectives between the GPUs of NVIDIA, on streams."""
