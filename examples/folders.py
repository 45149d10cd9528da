"""Folders of transformers: the model, its adapters if they are trained, and its tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapters
import torch
import weight_files

import cg


@dataclass(frozen=True)
class Model:
    """A model without its weights, and where they are.

    Attributes:
        whole: the model, on the meta device; its adapters are not.
        weights: its folder of weights.
        saved: gives the name of a tensor in checkpoints; None if they leave the tensor out.
        stem: the beginning of the names of weight files in checkpoints.
        files: further files of checkpoints: their text, by name.
        like: the folder whose other files belong into checkpoints; None if there is none.
    """

    whole: Any
    weights: Any
    saved: Callable[[str], str | None]
    stem: str
    files: dict[str, str]
    like: Path | None


def read_model(args: argparse.Namespace) -> Model:
    """The model of a folder, and with --lora its adapters.

    Raises:
        SystemExit: the folder is no model, its weights do not fit, are in a format that is not
            read, or are quantized and trained; or it needs code that is not trusted.
    """
    if not (args.model / "config.json").is_file():
        raise SystemExit(f"{args.model} is no folder of a model: it has no config.json")
    try:
        method = weight_files.quantization(args.model)
        if method is not None and not args.lora:
            raise ValueError(
                f"its weights are quantized ({method}), and steps of an optimizer would be lost "
                "in their rounding. Give --lora RANK, which trains adapters beside them, or a "
                "folder of the same model with weights in bfloat16, float16 or float32"
            )
        rename = adapters.name_in_model if args.lora else str
        weights = cg.pretrained(args.model, rename=rename)
        whole = _empty(args, weights)
        whole.train(args.dropout)
        if args.lora:  # before weights are quantized, since peft adapts experts that are tensors
            whole = adapters.add_adapters(whole, args.lora, args.model, args.seed)
            files = {"adapter_config.json": adapters.settings_of(whole)}
            model = Model(whole, weights, adapters.name_in_adapter, "adapter_model", files, None)
        else:
            model = Model(whole, weights, str, "model", {}, args.model)
        cg.keep_quantized(whole, weights)
        weights.check(whole)
        if weights.converted and cg.rank() == 0:
            print(weights)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{args.model} cannot be fine-tuned: {error}") from error
    return model


def _empty(args: argparse.Namespace, weights: Any) -> Any:
    """The model without its weights, with its head tied to its embedding if the files have it so.

    transformers does the same (`tie_weights`): a head and an embedding that are stored with
    different numbers are not tied, whatever the configuration says.
    """
    import transformers

    def make() -> Any:
        with cg.empty_weights():
            return transformers.AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=args.attention,
                trust_remote_code=args.trust_remote_code,
            )

    folder = args.model
    with _own_code_refused(folder):
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=args.trust_remote_code
        )
        model = make()
    if not weights.differing(model):
        return model
    if cg.rank() == 0:
        print(
            f"{folder} has a head that is not its embedding, so it is used, although config.json "
            "says tie_word_embeddings"
        )
    config.tie_word_embeddings = False
    model = make()
    differing = weights.differing(model)
    if differing:
        raise ValueError(f"'{differing[0]}' is stored several times, with different numbers")
    return model


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder; its own code runs only if it is trusted.

    Raises:
        SystemExit: there is none, or it needs code that is not trusted.
    """
    import transformers

    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        raise SystemExit(f"{folder} has no tokenizer: save the model's into it (save_pretrained)")
    with _own_code_refused(folder):
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )


@contextmanager
def _own_code_refused(folder: Path) -> Iterator[None]:
    """Where transformers refuses to run the Python of a folder, say in a line how to allow it."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise SystemExit(
            f"{folder} needs Python code that it brings: read it, and give --trust-remote-code to "
            "run it"
        ) from error
