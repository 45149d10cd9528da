"""The arms in the order in which they run: most wanted first."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = 2


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        side: `cg` or `torch`.
        words: options of the example, or of `torch_arm.py`.
        is_pipeline: whether ranks form a pipeline, so that microbatches are more.
        compiles: whether TorchInductor does.
        passes: those of cg that are switched off.
    """

    name: str
    side: str
    words: tuple[str, ...]
    is_pipeline: bool
    compiles: bool
    passes: str = ""

    def command(self, measured: Sequence[str]) -> list[str]:
        """How it is started.

        Args:
            measured: options that all arms take.
        """
        if self.side == "torch":
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            return [sys.executable, *start, str(HERE / "torch_arm.py"), *self.words, *measured]
        start = ["-m", "cg.launch", "-n", str(RANKS)]
        return [sys.executable, *start, str(HERE / "cg_arm.py"), *measured, "--", *self.words]


def _of_cg(name: str, *words: str, passes: str = "") -> dict[str, Arm]:
    is_pipeline = "--schedule" in words
    fused = (*words, "--fuse", "inductor")
    return {
        f"cg-{name}": Arm(f"cg-{name}", "cg", words, is_pipeline, False, passes),
        f"cg-{name}-fused": Arm(f"cg-{name}-fused", "cg", fused, is_pipeline, True, passes),
    }


def _pipeline_of_cg(schedule: str) -> dict[str, Arm]:
    words = ("--pp", str(RANKS), "--schedule", schedule)
    plain = _of_cg(f"pp-{schedule}", *words)
    return plain | _of_cg(f"pp-{schedule}-no-overlap", *words, passes="-overlap")


def _of_torch(name: str, *words: str) -> dict[str, Arm]:
    name, is_pipeline = f"torch-{name}", "pp" in words
    compiled = Arm(f"{name}-compiled", "torch", (*words, "--compile"), is_pipeline, True)
    return {name: Arm(name, "torch", words, is_pipeline, False), compiled.name: compiled}


_DATA = ("--pp", "1", "--dp", str(RANKS))
_ALL = {
    **_of_cg("dp", *_DATA),
    **_of_cg("fsdp-step", *_DATA, "--fsdp", "step"),
    **_of_cg("fsdp-task", *_DATA, "--fsdp", "task"),
    **_of_cg("fsdp-step-float8", *_DATA, "--fsdp", "step", "--float8"),
    **_of_cg("tp", "--pp", "1", "--tp", str(RANKS)),
    **_pipeline_of_cg("1f1b"),
    **_pipeline_of_cg("zb-h1"),
    **_pipeline_of_cg("auto"),
    **_of_torch("ddp", "ddp"),
    **_of_torch("fsdp2", "fsdp2"),
    **_of_torch("fsdp2-once", "fsdp2", "--once"),
    **_of_torch("fsdp2-float8", "fsdp2", "--float8"),
    **_of_torch("fsdp2-once-float8", "fsdp2", "--once", "--float8"),
    **_of_torch("tp", "tp"),
    **_of_torch("pp-1f1b", "pp", "--schedule", "Schedule1F1B"),
    **_of_torch("pp-zbv", "pp", "--schedule", "ScheduleZBVZeroBubble"),
    **_of_torch("pp-interleaved-zb", "pp", "--schedule", "ScheduleInterleavedZeroBubble"),
}

_ORDER = """
    cg-dp cg-fsdp-step cg-pp-1f1b cg-pp-1f1b-no-overlap cg-tp
    cg-dp-fused cg-fsdp-step-fused cg-pp-1f1b-fused cg-pp-1f1b-no-overlap-fused cg-tp-fused
    torch-ddp-compiled torch-fsdp2-compiled torch-fsdp2-once-compiled torch-tp-compiled
    torch-pp-1f1b-compiled torch-pp-zbv-compiled
    cg-pp-zb-h1 cg-pp-zb-h1-fused cg-pp-auto cg-pp-auto-fused cg-fsdp-task cg-fsdp-task-fused
    torch-ddp torch-fsdp2 torch-fsdp2-once torch-tp torch-pp-1f1b torch-pp-zbv
    cg-pp-zb-h1-no-overlap cg-pp-zb-h1-no-overlap-fused
    cg-pp-auto-no-overlap cg-pp-auto-no-overlap-fused
    torch-pp-interleaved-zb torch-pp-interleaved-zb-compiled
    cg-fsdp-step-float8-fused torch-fsdp2-once-float8-compiled torch-fsdp2-float8-compiled
"""

ARMS = {name: _ALL[name] for name in _ORDER.split()}


def matching(patterns: Sequence[str]) -> list[Arm]:
    """The arms whose names match, in order; all without a pattern.

    Raises:
        ValueError: nothing matches a pattern.
    """
    for pattern in patterns:
        if not fnmatch.filter(ARMS, pattern):
            raise ValueError(f"no arm is called {pattern}; there are {', '.join(ARMS)}")
    wanted = patterns or ("*",)
    return [arm for arm in ARMS.values() if any(fnmatch.fnmatch(arm.name, each) for each in wanted)]
