"""Whether a model can be served as is asked: its ranks, its draft, and what its layers keep."""

from __future__ import annotations

from collections.abc import Sequence

from .parts import Model, Ways

PADDED = 32
"""Kernels of attention on devices take rows by so many."""


def check_ranks(model: Model, ranks: int, ways: Ways) -> None:
    """Check that the ranks can hold a model's stages.

    Raises:
        ValueError: they cannot.
    """
    tp, ep, cp = ways.tp, ways.ep, ways.cp
    if min(tp, ep, cp) < 1:
        raise ValueError(f"--tp {tp}, --ep {ep} and --cp {cp} are numbers of ranks: give 1 or more")
    if ranks % ways.ranks or model.groups % tp or ranks // ways.ranks > model.layers:
        raise ValueError(
            f"{ranks} ranks by {ways.ranks} for each stage do not fit a model with {model.groups} "
            f"heads of keys and {model.layers} layers: --tp times --ep times --cp has to divide "
            "the ranks, --tp the heads of keys, and each stage has a layer"
        )
    if ep > 1 and model.experts is None:
        raise ValueError(
            f"--ep {ep} spreads experts over ranks, and the model has none: leave it out, or give "
            "--tp, which cuts heads and hidden units"
        )
    if model.experts is not None and ep > model.experts.count:
        raise ValueError(
            f"--ep {ep} is more than the {model.experts.count} experts of a layer: each rank has "
            "to have one"
        )
    if cp > 1 and (model.states or not model.caches):
        keeps = "states of sequences" if model.states else "nothing of a sequence"
        raise ValueError(
            f"layers of the model keep {keeps}, and --cp {cp} spreads keys and values over ranks: "
            "leave it out"
        )


def check_chunks(chunks: Sequence[int], ways: Ways, on_host: bool) -> None:
    """Check that ranks that share sequences can share every chunk.

    Raises:
        ValueError: a chunk has fewer tokens than there are ranks; or on devices, whose kernels pad
            rows, another number than a multiple of `PADDED`.
    """
    if chunks[0] < ways.cp:
        raise ValueError(
            f"a chunk of {chunks[0]} tokens cannot be shared by the {ways.cp} ranks of --cp: give "
            f"--chunk and --chunks of {ways.cp} or more"
        )
    if ways.cp > 1 and not on_host and any(length % PADDED for length in chunks):
        raise ValueError(
            f"chunks of {', '.join(map(str, chunks))} tokens, of which the {ways.cp} ranks of --cp "
            f"share multiples of {PADDED} on devices: give such numbers to --chunk and --chunks"
        )


def check_draft(draft: Model, model: Model, context: int) -> None:
    """Check that a model can propose tokens for another.

    Raises:
        ValueError: it cannot.
    """
    if draft.vocabulary != model.vocabulary:
        raise ValueError(
            f"the draft has {draft.vocabulary} tokens and the model {model.vocabulary}: give "
            "--draft a model with the same tokenizer, or --draft ngram"
        )
    if draft.context < context:
        raise ValueError(
            f"the draft takes {draft.context} tokens, and sequences have up to {context}: give "
            f"--context {draft.context}, or another draft"
        )


def check_states(model: Model, draft: Model | None, draft_tokens: int) -> None:
    """Check that proposals can be taken back, which are in a state once they were verified.

    Raises:
        ValueError: they cannot.
    """
    keeping = [
        name
        for name, candidate in (("model", model), ("draft", draft))
        if candidate and candidate.states
    ]
    if draft_tokens and keeping:
        raise ValueError(
            f"layers of the {keeping[0]} keep states, which proposals that are refused would "
            f"spoil: {'leave out --draft' if model.states else 'give another --draft'}"
        )


def check_float8(model: Model, draft: Model | None, kv_float8: bool) -> None:
    """Check that all that layers keep of a sequence can be in float8.

    Raises:
        ValueError: they keep states, which are no keys and values, or nothing.
    """
    for name, each in (("model", model), ("draft", draft)):
        if kv_float8 and each is not None and (each.states or not each.caches):
            keeps = "states of sequences" if each.states else "nothing of a sequence"
            raise ValueError(
                f"layers of the {name} keep {keeps}, and --kv-dtype fp8 is for keys and values "
                f"alone: {'leave it out' if name == 'model' else 'give another --draft'}"
            )
