"""Options of the engine, which the front takes and passes on to the ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from .pooling.recipe import POOLINGS, TASKS

NGRAM = "ngram"
"""The draft that is the text itself."""
DRAFT_TOKENS = 4
"""Tokens that are proposed for each row of a batch, unless a number is parsed."""
ADAPTER_SETTINGS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter, as peft names them."""


def share(text: str) -> float:
    """A share of something, above 0 and at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: give a number above 0, at most 1")
    return number


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


def draft_tokens(parsed: argparse.Namespace) -> int:
    """The number of tokens that are proposed for each row of a batch; 0 without a draft.

    Raises:
        ValueError: there is a number, and nothing to propose them.
    """
    if parsed.draft is None and parsed.draft_tokens is not None:
        raise ValueError("--draft-tokens needs --draft: give ngram, or a folder")
    if parsed.draft is None:
        return 0
    return DRAFT_TOKENS if parsed.draft_tokens is None else int(parsed.draft_tokens)


def refuse_for_pooling(parsed: argparse.Namespace) -> None:
    """Refuse options that mean nothing to a model that pools.

    Raises:
        ValueError: there is one.
    """
    names = (
        "groups",
        "chunk",
        "chunks",
        "batches",
        "memory",
        "blocks",
        "block_size",
        "draft",
        "lora",
    )
    for name in names:
        if getattr(parsed, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for models that draw tokens; leave it out")
    if parsed.features:
        raise ValueError("--features are of models that draw tokens; leave them out")


def adapters(parsed: argparse.Namespace) -> dict[str, Path]:
    """The folders of the adapters that requests may ask for, by name.

    Raises:
        FileNotFoundError: a folder has no adapter of peft.
        ValueError: an adapter has no name, or the name of another.
    """
    folders: dict[str, Path] = {}
    for entry in parsed.lora or ():
        name, _, folder = entry.partition("=")
        if not name or not folder or name in folders:
            raise ValueError(f"--lora takes NAME=DIR, each name once, and not {entry}")
        for file in (ADAPTER_SETTINGS, ADAPTER_WEIGHTS):
            if not (Path(folder) / file).is_file():
                raise FileNotFoundError(f"{folder} holds no adapter of peft: it has no {file}")
        folders[name] = Path(folder)
    return folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine; sizes that are not given are chosen (`defaults.py`)."""
    add = parser.add_argument
    add("--model", default="random", help="a folder, random, tiny-qwen2 or smollm2")
    add("--groups", type=int, help="decode batches in flight; by default one for each stage")
    add("--tp", type=int, default=1, help="ranks that hold a stage together")
    add("--ep", type=int, default=1, help="times --tp ranks hold a stage, each some of its experts")
    add("--cp", type=int, default=1, help="times these hold a stage, each some of a sequence")
    add("--layers", type=int, nargs="*", metavar="N", help="of each stage; balanced by default")
    add("--batch", type=int, help="the largest decode batch of a group; by default 256 on GPUs")
    add("--batches", type=int, nargs="*", metavar="N", help="below --batch; by default usual ones")
    add("--chunk", type=int, help="the longest prefill chunk, in tokens; by default 1024 on GPUs")
    add("--chunks", type=int, nargs="*", metavar="N", help="below --chunk; by default usual ones")
    add("--prompt-tokens", type=int, help="of all prompts of one prefill; of 16 chunks on GPUs")
    add("--memory", type=share, help="share of what is free for keys and values; 0.9 on GPUs")
    add("--blocks", type=int, help="blocks of a rank's pools; by default what --memory holds")
    add("--block-size", type=int, help="tokens of a block; by default 64 on GPUs, else 16")
    add("--context", type=int, help="the longest sequence; by default the model's, or --blocks'")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="by default the checkpoint's on GPUs, else float32",
    )
    add(
        "--kv-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of keys and values; fp8: 8 bits and a scale, for twice the tokens in the same memory",
    )
    add("--fuse", choices=("inductor", "none"), help="by default inductor where Triton is")
    add(
        "--draft", help="what proposes tokens: ngram, by the text itself, or a small model's folder"
    )
    add("--draft-tokens", type=count, help=f"proposed at a time; by default {DRAFT_TOKENS}")
    add(
        *("--lora", "--lora-modules"),
        nargs="+",
        action="extend",
        metavar="NAME=DIR",
        help="adapters that peft has written; clients ask for one by its name as their model",
    )
    add("--task", choices=TASKS, default="auto", help="by default what the model's folder says")
    add("--pooling", choices=POOLINGS, help="of a model that pools; by default as its folder says")
    add(
        "--dimensions",
        type=count,
        nargs="*",
        metavar="N",
        help="to which vectors may be cut; without a number to any",
    )
    add("--ahead", action="store_true", help="compile all variants before it is ready")
    add("--profile", metavar="DIR", help="write what every rank does, as cg.profile records it")
    add("--features", default="", help="switches, such as -prefix,+inproc")


def words(parsed: argparse.Namespace) -> list[str]:
    """The options of the engine as words of a command line, which parse to the same values."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    several, single = [], []
    for name in vars(parser.parse_args([])):
        value, option = getattr(parsed, name), f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            several += [option, *map(str, value)]
        elif isinstance(value, bool):
            single += [option] if value else []
        elif value is not None:
            single.append(f"{option}={value}")
    return [*several, *single]  # a list would take a word behind it as its own
