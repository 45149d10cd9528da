"""Dropout within attention over a cut sequence, in processes of their own.

mpiexec -n 2 python -m tests.mpi.dropout_job
"""

from __future__ import annotations

import cg

from ..tracer.groups.dropout_training import check


def main() -> None:
    """Each rank compares results and its pieces of gradients with one process."""
    check((cg.mesh(dp=1, cp=cg.world_size(), tp=1),), "zigzag-ring")
    if cg.world_size() == 4:
        check((cg.mesh(dp=1, cp=2, tp=2),), "best", "documents", store=cg.cut(0, "dp", "cp"))
        check(cg.mesh(pp=2, dp=1, cp=2, tp=1).unbind("pp"), "ring", remat=True)
    print(f"rank {cg.rank()} agrees", flush=True)


if __name__ == "__main__":
    main()
