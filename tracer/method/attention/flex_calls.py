"""Let traced methods call `torch.nn.attention.flex_attention.flex_attention`.

Torch's function checks its arguments, and hands them to a higher-order operator, by TorchDynamo.
In a trace it hands them to the operators of `flex_operators`, which also have a derivative on
hosts.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _cast

from ...error_translation import refusal_here
from ..purity.dispatch_modes import run_noted
from ..purity.function_log import OfGraph
from .flex_operators import ONE_BLOCK, FlexAttentionFunction, FlexForm
from .modifications import (
    Modification,
    NotRecordable,
    aligned_dimensions,
    joint_text,
    recorded,
)


class FlexAttention(OfGraph):
    """`flex_attention` of recorded functions, as a function that a log of functions may hold."""

    def __call__(
        self,
        form: str,
        operands: Sequence[Tensor],
        captured: Sequence[Tensor],
        mask_captured: Sequence[Tensor],
        blocks: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and for each row the logarithm, to base 2, of its sum, and its largest score.

        Args:
            form: the text of a `FlexForm`.
            operands: query `[B, Hq, L, E]`, key `[B, Hkv, S, E]` and value `[B, Hkv, S, F]`.
            captured, mask_captured: what the functions of scores and of the mask take.
            blocks: the tensors of the mask's blocks; none on hosts, where all scores are computed.
        """
        counts = (len(captured), len(mask_captured))
        others = (*captured, *mask_captured, *blocks)
        results: tuple[Tensor, Tensor, Tensor]
        results = FlexAttentionFunction.apply(form, counts, *operands, *others)  # type: ignore[no-untyped-call]
        return results


FLEX = FlexAttention()

FLEX_MODULE = "torch.nn.attention.flex_attention"


@contextmanager
def flex_attention_traced(shown: str) -> Iterator[None]:
    """Let `flex_attention` be traced inside the `with` block.

    Args:
        shown: the traced call in words.
    """
    # Imported here, since TorchDynamo comes with it, and sympy.
    names: dict[str, Any] = vars(importlib.import_module(FLEX_MODULE))

    def attention(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        return attend(shown, *operands)

    own = {
        "flex_attention_hop": attention,
        "_validate_device": lambda query, key, value: None,  # there is a derivative on hosts
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # without TorchDynamo
    }
    before = {name: names[name] for name in own}
    names.update(own)
    try:
        yield
    finally:
        names.update(before)


def attend(
    shown: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention as torch's higher-order operator takes it, by the operators of `flex_operators`.

    Args:
        shown: the traced call in words.
        query, key, value: as `flex_attention` takes them.
        score_mod: takes a score and its four indices.
        block_mask: lengths, tensors of blocks, the sizes of a block, and `mask_mod`.
        scale: the factor of products.
        options: of torch's kernel.

    Returns:
        The result, and of each row the logarithm, to base 2, of its sum, and its largest score.

    Raises:
        TraceError: a graph cannot keep what the functions do.
    """
    if options.get("BACKEND") == "FLASH":
        raise refusal_here(
            shown,
            "flex_attention is asked for BACKEND='FLASH', whose statistics are in other units",
            "leave BACKEND out of kernel_options",
        )
    operands = [_under_autocast(tensor) for tensor in (query, key, value)]
    query, key, value = operands
    if query.shape[0] != key.shape[0]:
        operands[1:] = [t.expand(query.shape[0], *t.shape[1:]) for t in (key, value)]
    assert isinstance(query, FakeTensor)
    mode = query.fake_mode
    wide = torch.promote_types(query.dtype, torch.float32)
    with mode:
        example = torch.zeros((), dtype=wide, device=query.device, requires_grad=True)
    score = _recorded(shown, "score_mod", score_mod, example, mode)
    blocks = list(block_mask[2:10])
    mask = _recorded(shown, "mask_mod", block_mask[-1], None, mode)
    if any(tensor.requires_grad for tensor in mask.captured):
        raise refusal_here(
            shown,
            "mask_mod takes a tensor that requires a gradient, and a mask has none",
            "detach it outside of mask_mod",
        )
    joint = ""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, *score.captured)):
        needs = [tensor.requires_grad for tensor in score.captured]
        joint = _in_words(shown, "score_mod", lambda: joint_text(score, example, needs))
    sizes = (query.shape[0], query.shape[1], query.shape[2])
    has_blocks = query.device.type != "cpu" and block_mask[-3] != ONE_BLOCK[0]
    form = FlexForm(
        *(score.text, joint, mask.text, float(scale), json.dumps(options)),
        tuple(map(int, block_mask[:2] if has_blocks else (1, 1))),
        tuple(map(int, block_mask[-3:-1])) if has_blocks else ONE_BLOCK,
        len(block_mask) - len(blocks) - 5,
        aligned_dimensions(score.text, True, score.captured, sizes),
        aligned_dimensions(mask.text, False, mask.captured, sizes),
    )
    blocks = blocks if has_blocks else []
    parts = (form.text, operands, list(score.captured), list(mask.captured), blocks)
    return run_noted(FLEX, parts)  # type: ignore[no-any-return]


def _under_autocast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return _cast(tensor, kind, torch.get_autocast_dtype(kind))  # type: ignore[no-any-return]
    return tensor


def _recorded(
    shown: str, name: str, function: Callable[..., Tensor], score: Tensor | None, mode: Any
) -> Modification:
    modification: Modification = _in_words(shown, name, lambda: recorded(function, score, mode))
    return modification


def _in_words(shown: str, name: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, which works on a function of scores that the call names so."""
    try:
        return make()
    except NotRecordable as error:
        raise refusal_here(shown, f"{name} {error.reason}", error.remedy) from error
