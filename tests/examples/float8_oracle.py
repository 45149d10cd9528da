"""A cache of transformers that rounds keys and values as the server's float8 cache does."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from examples.serve.float8_cache import dequantize, quantize


class Float8Cache(DynamicCache):
    """A cache that keeps what float8 keeps."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kept = [dequantize(*quantize(each), each.dtype) for each in (key_states, value_states)]
        shown: tuple[Tensor, Tensor] = super().update(*kept, layer_idx, *args, **kwargs)
        return shown
