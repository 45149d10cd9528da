"""The options of fine-tuning."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import cg

ATTENTION = ("sdpa", "flex_attention", "eager")
"""The implementations of attention that can be traced; with --cp, the first two."""


def parse(description: str) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: options do not fit one another, or the number of ranks.
    """
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model, its weights and tokenizer")
    add(
        "--data",
        type=Path,
        nargs="*",
        action="extend",
        default=[],
        help="text files, or JSON lines (.jsonl)",
    )
    add("--out", type=Path, default=Path("runs/finetune"))
    add("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    add("--pp", type=int, default=cg.world_size(), help="groups of ranks in the pipeline")
    add("--dp", type=int, default=1, help="ranks of a group that share the batch")
    add("--ep", type=int, default=1, help="ranks of a group that share experts, and the batch too")
    add("--cp", type=int, default=1, help="ranks of a group that share the tokens of a window")
    add(
        "--cp-form",
        choices=("gather", "heads", "ring"),
        help="with --cp: how attention gets keys of other ranks; left out: the fastest",
    )
    add(
        "--cp-order",
        choices=("rows", "zigzag"),
        default="rows",
        help="with --cp: zigzag gives a rank tokens of both ends, and all equal causal work",
    )
    add("--tp", type=int, default=1, help="ranks of a group that share weights")
    add(
        "--sequence-parallel",
        action="store_true",
        help="with --tp: between layers whose weights they share, each has tokens of its own",
    )
    add(
        "--fsdp",
        choices=("auto", "step", "task"),
        help="weights in pieces along --dp, --ep and --cp; gathered ones stay for a step or a task",
    )
    add(
        "--store",
        choices=("host", "host-state"),
        help="weights and what AdamW keeps rest on hosts, beside devices; or the latter alone",
    )
    add("--stages", type=int, nargs="*", help="layers of each stage, to cut by hand")
    add("--schedule", default="1f1b", choices=cg.schedules.names())
    add("--memory", help="bytes that a rank's program may hold beside weights, as 40GiB")
    add("--fuse", choices=("inductor",), help="have TorchInductor compile the stages")
    add("--bf16", action="store_true", help="compute in bfloat16; weights stay float32")
    add(
        "--float8",
        nargs="?",
        const="tensorwise",
        choices=("tensorwise", "rowwise"),
        help="products of linear layers in float8, with a scale for a tensor, or for a row",
    )
    add("--lora", type=int, default=0, help="train adapters of this rank alone")
    add("--attention", default="sdpa", choices=ATTENTION, help="what can be traced")
    add(
        "--dispatch",
        choices=("auto", "gather", "exchange"),
        default="auto",
        help="with --ep: all tokens go to all ranks of experts, or rows to those that need them",
    )
    add("--tasks-in-flight", type=int, default=1, help="2: rows travel while other tasks compute")
    add("--experts", help="how a mixture computes its experts, such as batched_mm; cg if left out")
    add(
        "--capacity",
        type=float,
        help="room of an expert, 1: as if balanced; left out: no end",
    )
    add("--auxiliary-loss", type=float, help="coefficient; that of config.json if left out")
    add("--z-loss", type=float, default=0.0, help="coefficient of the z-loss of routers")
    add("--correction", type=float, default=0.0, help="step of the correction biases of routers")
    add("--trust-remote-code", action="store_true", help="run Python that the folder brings")
    add("--dropout", action="store_true", help="drop out as the model says, in evaluations too")
    add("--steps", type=int, default=100, help="steps in all, resumed ones included")
    add("--batch", type=int, default=8, help="windows of text a step")
    add("--microbatches", type=int, default=4, help="parts of it, whose gradients are added up")
    add("--length", type=int, default=256, help="tokens of a window")
    add("--pack", action="store_true", help="documents of a window do not see each other")
    add("--windows", type=int, default=20_000, help="windows to be read at most")
    add("--rate", type=float, default=2e-5, help="peak learning rate")
    add("--decay", type=float, default=0.0, help="weight decay")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients")
    add("--seed", type=int, default=0)
    add("--evaluate-every", type=int, default=25, help="0: never")
    add("--evaluate-batches", type=int, default=2)
    add("--save-every", type=int, default=50)
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add("--prompt", default="The capital of France is", help="to be continued at the end")
    add("--sample", type=int, default=24, help="tokens to continue it by; 0: none")
    add("--trace", type=Path, help="write a profile of all ranks, for Perfetto, to this file")
    args = parser.parse_args()
    sizes = ("pp", "dp", "ep", "cp", "tp")
    for name in (*sizes, "steps", "batch", "microbatches", "length", "save_every", "keep"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    ranks = math.prod(vars(args)[name] for name in sizes)
    if ranks != cg.world_size():
        product = " x ".join(f"--{name} {vars(args)[name]}" for name in sizes)
        parser.error(f"{product} are {ranks} ranks, and there are {cg.world_size()}")
    copies = args.dp * args.ep
    if args.batch % args.microbatches or args.batch // args.microbatches < copies:
        parser.error(
            f"--batch {args.batch} does not divide into {args.microbatches} microbatches of a "
            f"window or more for each of {copies} ranks"
        )
    if args.fsdp and copies * args.cp == 1:
        parser.error(
            "--fsdp keeps weights in pieces on the ranks of --dp, --ep and --cp: give one above 1"
        )
    if args.length < args.cp:
        parser.error(f"--length {args.length}: give each rank of --cp {args.cp} a token or more")
    if args.sequence_parallel and args.tp == 1:
        parser.error("--sequence-parallel cuts tokens along --tp: give --tp above 1")
    if args.cp > 1 and args.attention == "eager":
        parser.error(
            "--cp with --attention eager: give sdpa or flex_attention, for tokens that ranks share"
        )
    if args.lora and args.tp > 1:
        parser.error(
            "--lora with --tp: the plans of models do not say how adapters are cut; use --dp, "
            "--ep, --cp or --pp"
        )
    if args.lora and args.correction:
        parser.error("--correction moves biases of the model, which folders of --lora do not have")
    if args.capacity is not None and not args.capacity > 0:
        parser.error(f"--capacity {args.capacity} must be above 0")
    if missing := [str(file) for file in args.data if not file.is_file()]:
        parser.error(f"--data: there is no file {', '.join(missing)}")
    return args
