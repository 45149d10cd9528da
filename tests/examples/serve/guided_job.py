"""Serve a folder on ranks; rank 0 draws texts under grammars and compares their tokens.

mpiexec -n 2 python -m tests.examples.serve.guided_job FOLDER [TP]
mpiexec -n 2 python -m tests.mpi.device_job --strict tests.examples.serve.guided_job FOLDER [TP]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from examples.serve.engine import start

from .guided import complete
from .test_guides import OPTIONS, Tokens, check_tokens, mixed


def main() -> None:
    folder, tp = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    engine = start(folder, replace(OPTIONS, tp=tp, groups=None if tp == 1 else 1))
    if engine is None:
        return
    requests = mixed(257)
    outcomes = complete(engine, Tokens(folder), requests)
    engine.close()
    check_tokens(folder, outcomes, requests)
    print(f"{len(requests)} texts are those of transformers", flush=True)


if __name__ == "__main__":
    main()
