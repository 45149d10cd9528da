"""Options of the engine, which the front takes and passes on to the ranks."""

from __future__ import annotations

import argparse

from .loop import USUAL_CHUNK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine."""
    add = parser.add_argument
    add("--model", default="random", help="a folder, random, tiny-qwen2 or smollm2")
    add("--groups", type=int, help="decode batches in flight; by default one for each stage")
    add("--tp", type=int, default=1, help="ranks that hold a stage together")
    add("--layers", type=int, nargs="*", metavar="N", help="of each stage; balanced by default")
    add("--batch", type=int, default=8, help="the largest decode batch of a group")
    add("--batches", type=int, nargs="*", metavar="N", help="below --batch; by default usual ones")
    add("--chunk", type=int, default=USUAL_CHUNK, help="the longest prefill chunk, in tokens")
    add("--chunks", type=int, nargs="*", metavar="N", help="below --chunk; by default usual ones")
    add("--prompt-tokens", type=int, help="of all prompts of one prefill; one prompt by default")
    add("--blocks", type=int, default=512, help="blocks of a rank's pools")
    add("--block-size", type=int, default=16, help="tokens of a block")
    add(
        "--context",
        type=int,
        help="the longest sequence; by default the model's, or what the blocks hold",
    )
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--fuse", choices=("inductor",), help="compile bodies with torch.compile's backend")
    add("--profile", metavar="DIR", help="write what every rank does, as cg.profile records it")
    add("--features", default="", help="switches, such as -prefix,+inproc")
