"""Let torch's modules take paths that a graph can record, with the results of their usual paths.

`nn.LSTM` and `nn.GRU` go step by step, where torch's own loop runs. `nn.TransformerEncoder` has a
fast path for inference: given a mask of padding, torch packs the rows that count and fills the
others with zeros. In a trace it takes the general path, which computes padded rows like all others.
So they are zeroed here. A batch norm without momentum averages over all batches, by a count that it
reads as a number of Python; here the count stays a tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...values.actor_state import ActorState


@contextmanager
def padded_rows_zeroed(state: ActorState) -> Iterator[None]:
    """Let encoders give zeros for padded rows inside the `with` block, as in plain Python."""
    if not any(isinstance(obj, nn.TransformerEncoder) for obj, _ in state.objects):
        yield
        return
    general = nn.TransformerEncoder.forward

    @functools.wraps(general)
    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
        src, padding = arguments["src"], arguments.get("src_key_padding_mask")
        if arguments.get("mask") is not None or padding is None or not _is_fast(self, src):
            return general(self, *args, **kwargs)
        norm = self.norm
        if norm is not None:
            self._modules["norm"] = None  # it comes after the zeros
        try:
            output = general(self, *args, **kwargs)
        finally:
            if norm is not None:
                self._modules["norm"] = norm
        output = torch.where(_rows(self, padding)[:, :, None], 0.0, output)
        return output if norm is None else norm(output)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = general  # type: ignore[method-assign]


_SIGNATURE = inspect.signature(nn.TransformerEncoder.forward)


def _is_fast(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """True if plain Python would pack the rows, provided that the mask's values allow it."""
    first: Any = encoder.layers[0]
    tensors = (src, *first.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and bool(getattr(encoder, "use_nested_tensor", False))
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def _rows(encoder: nn.TransformerEncoder, padding: torch.Tensor) -> torch.Tensor:
    """The padded rows; none if the encoder checks the mask and finds padding before an end."""
    padded = padding.bool()
    if not getattr(encoder, "mask_check", True):
        return padded
    left = torch.arange(padded.shape[1], device=padded.device) < (~padded).sum(1)[:, None]
    return padded & (left == ~padded).all()


@contextmanager
def without_fused_recurrence(state: ActorState) -> Iterator[None]:
    """Trace LSTM and GRU step by step, where torch's own loop runs, in actors that have them.

    `whole_loops.py` says where that is. oneDNN's fused kernels save tensors for the backward only
    if gradients are enabled when they run. cuDNN's rearrange the memory of their weights, which a
    graph cannot do.
    """
    if not any(isinstance(obj, torch.nn.RNNBase) for obj, _ in state.objects):
        yield
        return
    # Not by `torch.backends`, which torch's own test library freezes where it is imported.
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


@contextmanager
def averages_over_all_batches(state: ActorState) -> Iterator[None]:
    """Let batch norms without momentum average over all batches inside the `with` block."""
    if not any(isinstance(obj, _BatchNorm) for obj, _ in state.objects):
        yield
        return
    general = _BatchNorm.forward

    @functools.wraps(general)
    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        averages = self.momentum is None and self.training and self.track_running_stats
        if not averages or mean is None or variance is None or count is None:
            return general(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        count.add_(1)
        own = torch.zeros_like(mean), torch.zeros_like(variance)  # of this batch
        scales = self.weight, self.bias
        output = nn.functional.batch_norm(input, *own, *scales, True, 1.0, self.eps)
        share = count.to(torch.promote_types(mean.dtype, torch.float32)).reciprocal()
        for running, value in zip((mean, variance), own, strict=True):
            running.copy_(value * share + running * (1 - share))
        return output

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = general  # type: ignore[method-assign]
