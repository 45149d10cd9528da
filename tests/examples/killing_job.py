"""Kills a fine-tuning -9 at random moments, resumes it each time, and looks at what is left.

    python tests/examples/killing_job.py KILLS FOLDER finetune.py --model DIR ... --resume

Each run is a fork of this process, which has imported everything and never computes. Runs go to
FOLDER/run0 and so on, until there were so many kills. After each, every checkpoint must open. The
losses of the runs that came to their end are printed.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo.config  # which a trace imports
import torch.export
import transformers

import cg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import finetune


def fork(work: Callable[[], None], output: int) -> int:
    """Do something in a fork; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            torch.set_num_threads(1)
            work()
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    return child


def tune(words: list[str]) -> None:
    sys.argv = words
    finetune.main()


def killed(words: list[str], seconds: float) -> float | None:
    """Fine-tune, and kill that so long after its first step.

    Returns:
        None; or, if it was faster, the seconds that it took from there to its end.
    """
    reads, writes = os.pipe()
    child = fork(lambda: tune(words), writes)
    os.close(writes)
    text = ""
    while "loss " not in text:
        part = os.read(reads, 1 << 16)
        assert part, f"it has ended before its first step:\n{text}"
        text += part.decode(errors="replace")
    began = time.monotonic()
    until = began + seconds
    is_over = False
    while not is_over and (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([reads], [], [], left)
        is_over = bool(ready) and not os.read(reads, 1 << 16)
    if not is_over:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reads)
    assert not is_over or status == 0, "a run has failed"
    return time.monotonic() - began if is_over else None


def open_all(folder: Path) -> None:
    for each in folder.glob("step-*"):
        model = transformers.AutoModelForCausalLM.from_pretrained(each)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def import_all() -> None:
    """Import what cg and transformers would import on first use, so that forks have it."""
    for name in cg.__all__:
        getattr(cg, name)
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "LlamaForCausalLM"):
        getattr(transformers, name)


def main() -> None:
    import_all()
    wanted, folder, words = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    draw = random.Random(0)
    kills = runs = 0
    whole = killed([*words, "--out", str(folder / "whole")], 1e6)
    assert whole is not None
    while kills < wanted:
        out = folder / f"run{runs}"
        given = [*words, "--out", str(out)]
        # Over the whole of a run, and a little behind it, so that some come to their end.
        while killed(given, draw.uniform(0.0, 1.1 * whole) if kills < wanted else 1e6) is None:
            kills += 1
            looking = fork(lambda out=out: open_all(out / "checkpoints"), 2)  # type: ignore[misc]
            assert os.waitpid(looking, 0)[1] == 0, f"after {kills} kills one does not open"
            names = sorted(each.name for each in (out / "checkpoints").glob("step-*"))
            print(f"kill {kills}: {names[-1:] or 'no checkpoint'} is the newest", flush=True)
        print(f"losses of {out}", (out / "figures.json").read_text(), flush=True)
        runs += 1
    print(f"{kills} kills", flush=True)


if __name__ == "__main__":
    main()
