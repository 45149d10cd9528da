"""Command lines beside the launcher: `cg-opt`, `cg-sim`, the self-test of HCCL.

In: files and options. Out: text, and an exit status.
"""
