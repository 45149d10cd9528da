"""Write a folder of transformers with Qwen2.5-0.5B's shapes, random weights and a tokenizer.

    python -m benchmarks.one_gpu.folder DIR

Nothing is downloaded. The weights are those that the engine draws for the same shapes. Each of the
tokens has a text of its own, printable ASCII, so a stream has text for each token that is drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2ForCausalLM

from examples.serve.weights import Drawn

from .qwen2 import REAL, SMALL, Sizes

SPACE, LINE = "\u0120", "\u010a"
"""How tokens of bytes write a space and the end of a line."""


def write(folder: Path, sizes: Sizes, context: int, dtype: torch.dtype, *, spare: int = 0) -> None:
    """Write the folder, which may be there already.

    Args:
        context: tokens of the longest sequence.
        spare: rows of the embedding beyond the tokens. Transformers gives Qwen2's tokenizers an end
            of text, which takes the first one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = sizes.config(context)
    config.architectures, config.dtype = ["Qwen2ForCausalLM"], dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(Qwen2ForCausalLM(config).named_parameters())
    weights = Drawn(0, config.initializer_range).load(parameters, dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(sizes.vocabulary - spare).save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind) + "\n")


def tokenizer(size: int) -> Tokenizer:
    """One of so many tokens: the characters of ASCII, and words that no text is encoded by."""
    characters = [*map(chr, range(33, 127)), SPACE, LINE]
    words = (SPACE + _word(number) for number in range(size - len(characters)))
    vocabulary = {token: place for place, token in enumerate((*characters, *words))}
    found = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def _word(number: int) -> str:
    """Four letters."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR")
    add("--context", type=int, default=2048, help="tokens of the longest sequence")
    add("--dtype", default="float16", choices=("float32", "bfloat16", "float16"))
    add("--small", action="store_true", help="tiny shapes, for a trial on hosts")
    given = parser.parse_args()
    sizes = SMALL if given.small else REAL
    write(given.folder, sizes, given.context, getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
