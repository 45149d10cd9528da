"""Serve a folder on the ranks of a job; rank 0 runs requests with proposals and compares tokens.

mpiexec -n 2 python -m tests.examples.speculation_job FOLDER [DRAFT]
mpiexec -n 2 python -m tests.mpi.device_job tests.examples.speculation_job FOLDER [DRAFT]

Without a draft, proposals are guesses, of which some are right.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import cg
from cg.launch.world import world as worlds
from examples.serve.engine import start
from examples.serve.requests import Request

from .serve_job import say_how_devices_run
from .serve_models import FEW, generate, load_qwen2
from .serve_requests import guesses, nothing, serve


def main() -> None:
    folder = Path(sys.argv[1])
    draft = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    engine = start(folder, replace(FEW, groups=1, late=True, draft_tokens=3, draft=draft))
    if engine is None:
        print(f"rank {cg.rank()} has served", flush=True)
        return
    model = load_qwen2(folder)
    requests = [Request(id_, (7 + id_, 3, 40), 4) for id_ in range(6)]
    right = {each.id: generate(model, each.prompt, each.max_tokens) for each in requests}
    proposes = guesses(right, 0.6, engine.limits.vocabulary)
    for _ in range(3):  # devices replay what they have recorded
        served = serve(engine, requests, proposes)
    if draft is None:
        serve(engine, requests, nothing)
    if worlds.world().device is not None:
        say_how_devices_run(engine)
    engine.close()
    wrong = sum(served.tokens[id_] != tokens for id_, tokens in right.items())
    speculation = served.speculation
    print(
        f"{len(requests)} requests: {wrong} differences, {speculation.accepted_tokens} of "
        f"{speculation.draft_tokens} proposed tokens accepted",
        flush=True,
    )


if __name__ == "__main__":
    main()
