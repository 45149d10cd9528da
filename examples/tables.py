"""Refuse ids and lengths for which a model's tables have no row, before anything is compiled.

On the host, torch raises in the middle of a step. On a GPU, a kernel asserts, which ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn


def check_ids(
    used: Mapping[str, Sequence[int]], tokenizer: Any, model: nn.Module, folder: Path
) -> None:
    """Refuse tokens that the model's embedding has no row for.

    Only tokens that are looked up count. A tokenizer may have more tokens than the embedding has
    rows, such as tokens of images for another model. They do no harm as long as no text has them.
    The texts include the ends of text between documents and the tokens of templates, and nothing
    is padded.

    Args:
        used: the ids that are looked up, by where they come from, in words.
        folder: of the model.

    Raises:
        ValueError: a token is beyond the embedding.
    """
    rows = len(model.get_input_embeddings().weight)
    for source, ids in used.items():
        highest = max(ids, default=0)
        if highest < rows:
            continue
        tokens = len(tokenizer)
        size = max(tokens, *(number + 1 for number in tokenizer.get_vocab().values()))
        raise ValueError(
            f"{source} has the token {tokenizer.convert_ids_to_tokens(highest)!r} of id {highest}, "
            f"and the embedding of {folder} has {rows} rows, while the tokenizer has {tokens} "
            f"tokens, added ones included. {resize(folder, size)}"
        )


def resize(folder: Path, size: int) -> str:
    """The remedy for a tokenizer that has outgrown its model."""
    return (
        "Give the model a row for each token, and save it into its folder again:\n"
        '  python -c "import transformers; '
        f"model = transformers.AutoModelForCausalLM.from_pretrained('{folder}'); "
        f"model.resize_token_embeddings({size}); model.save_pretrained('{folder}')\""
    )


def check_length(length: int, model: nn.Module, folder: Path) -> str | None:
    """Refuse windows that are longer than a table of positions.

    Returns:
        A note where positions are computed, as rotary ones are: then any length works, as it does
        in transformers. None if the model was made for such windows.

    Raises:
        ValueError: a table of positions is shorter.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None or length <= positions:
        return None
    table = _table_of(positions, model)
    if table is None:
        return (
            f"--length {length} is more than the {positions} positions that {folder} was made for "
            "(max_position_embeddings); they are computed, so training goes on"
        )
    raise ValueError(
        f"--length {length} is more than the {positions} positions of {folder}: {table} has a row "
        f"for each, and no more. Give --length {positions} or less"
    )


def _table_of(positions: int, model: nn.Module) -> str | None:
    """The name of a table with a row for each position, learned or not; None without one.

    Some models leave rows ahead of the first position, as OPT does: at most `SPARE`.
    """
    tokens = model.get_input_embeddings()
    sizes = range(positions, positions + SPARE + 1)
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and module is not tokens
            and len(module.weight) in sizes
        ):
            return name
    for name, buffer in model.named_buffers():
        if buffer.dim() == 2 and len(buffer) in sizes:
            return name
    return None


SPARE = 2
"""The most rows of a table of positions that belong to no position."""
