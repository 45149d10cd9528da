"""Shapes of models, their folders with random weights, and the operations that a token takes.

    python benchmarks/finetuning/shapes.py DIR --shape 0.5B

writes a folder as `save_pretrained` does: weights in bfloat16, and a tokenizer of bytes. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model with tied embeddings, and how it is trained.

    Attributes:
        key_heads: heads of keys and values.
        length: tokens of a sequence.
        batch: sequences of a step.
        microbatches: of a step, where ranks do not form a pipeline.
        pipeline_microbatches: of a step, where they do.
    """

    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    length: int = 1024
    batch: int = 16
    microbatches: int = 2
    pipeline_microbatches: int = 8

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length

    @property
    def head_parameters(self) -> int:
        """Of the embedding, which is the head as well."""
        return self.vocabulary * self.width

    @property
    def layer_parameters(self) -> int:
        keys = self.width // self.heads * self.key_heads
        attention = 2 * self.width * self.width + self.width + 2 * keys * (self.width + 1)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.head_parameters + self.layers * self.layer_parameters + self.width

    @property
    def layer_operations(self) -> int:
        """Of a token in a layer, forward and backward."""
        return 6 * self.layer_parameters + 12 * self.width * self.length

    @property
    def operations(self) -> int:
        """Of a token, forward and backward: 6 N + 12 L W T.

        N are the parameters, L the layers, W the width of all heads together, T the tokens of a
        sequence. This is the count of PaLM (Chowdhery et al. 2022, appendix B), which does not
        halve attention for being causal.
        """
        return 6 * self.parameters + 12 * self.layers * self.width * self.length


SHAPES = {
    "tiny": Shape(1024, 64, 128, 4, 4, 2, length=32),
    "0.5B": Shape(151936, 896, 4864, 24, 14, 2),
    "3B": Shape(151936, 2048, 11008, 36, 16, 2, microbatches=8),
}
"""Qwen2.5's by size, and one to try everything out with on CPUs."""

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 operations a second, by a part of the card's name, from NVIDIA's data sheets.

Those of the Hopper cards give the figure with sparsity, which is twice this one.
"""


def peak(card: str) -> float | None:
    """Of a card, by its name; None if it is not known."""
    return next((value for name, value in PEAKS.items() if name in card), None)


def stage_layers(shape: Shape, stages: int) -> list[range]:
    """The layers of each stage, so that the longest stage is as short as it can be.

    The last stage has the head besides, and may have no layer.
    """
    head = 6 * shape.head_parameters / shape.layer_operations

    def longest(last: int) -> float:
        """The layers of the longest stage, the head counted as so many."""
        return max(math.ceil((shape.layers - last) / (stages - 1)), last + head)

    others = shape.layers - min(range(shape.layers), key=longest)
    cuts = [others * stage // (stages - 1) for stage in range(stages)]
    return [range(*cut) for cut in itertools.pairwise([*cuts, shape.layers])]


def config(shape: Shape) -> Any:
    """As transformers describes it."""
    import transformers

    return transformers.Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4 * shape.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )


def write(folder: Path, shape: Shape) -> None:
    """Write the folder; weights are drawn on the GPU, if there is one."""
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """One token for each byte, and one for the end of a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab={**letters, "<end>": len(letters)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    args = parser.parse_args()
    write(args.folder, SHAPES[args.shape])


if __name__ == "__main__":
    main()
