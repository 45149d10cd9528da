"""Attention over a paged cache, by which transformers' own modules run in a stage.

A model of transformers keeps keys and values in a cache, asks the cache how long they are, makes
masks of that, and attends by a function that it looks up by name. Here these three are a paged
cache, masks of the positions of each row, and `attention`. All else is the model's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import paged
from .pages import Pages
from .spread import SpreadPages
from .states import CacheLayers

NAME = "cg_paged"
"""The name of the attention among those of transformers."""


class _Seen(int):
    """How many keys a row is shown, and the cache that shows them, for `paged_mask`."""

    cache: PagedCache


class PagedCache(Cache):
    """The cache of a batch, as models of transformers take one.

    Args:
        pages: of the batch.
        layers: that keep states; by default those of the slots.

    Attributes:
        pages: of the batch.
        written: what the last `update` has returned, and its layer.
        is_asked: whether the model's own code has asked how long the cache is.
    """

    def __init__(self, pages: Pages, layers: CacheLayers | None = None) -> None:
        super().__init__(layers=CacheLayers(pages.slots) if layers is None else layers)
        self.pages = pages
        self.written: tuple[Tensor, Tensor, int] | None = None
        self.is_asked = False
        self._causal: list[Tensor] = []
        self._repeated: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.pages.write(key_states, value_states, layer_idx)
        self.written = keys, values, layer_idx
        return keys, values

    @property
    def is_spread(self) -> bool:
        """True if the batch reads pools that lie on several ranks."""
        return isinstance(self.pages, SpreadPages) and self.pages.tables.numel() > 0

    def layer_of(self, key: Tensor, value: Tensor) -> int | None:
        """The layer whose pool has these keys and values; None if a model has changed them."""
        if self.written is None:
            return None
        keys, values, layer = self.written
        return layer if key is keys and value is values else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The keys that a row is shown beside its own; it may have fewer."""
        self.is_asked = True
        return self.get_query_offset(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.pages.seen - self.pages.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys, and the first one's."""
        seen = _Seen(self.pages.seen)
        seen.cache = self
        return seen, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True if the layers go on with states of their own."""
        return self.pages.slots.begins is not None

    def mask(self, sees: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        """A mask, [rows, 1, tokens, `seen`]: 0 where a token sees a key, else the least number.

        Args:
            sees: gives booleans of indices of a row, a head, a query and a key.
            dtype: of the mask.
        """
        positions = self.pages.positions
        device, rows = positions.device, len(positions)
        numbers = torch.arange(rows, device=device)[:, None, None, None]
        keys = torch.arange(self.pages.seen, device=device)[None, None, None]
        seen = sees(numbers, torch.zeros_like(numbers[:1]), positions[:, None, :, None], keys)
        shut = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask = torch.where(seen, torch.zeros_like(shut), shut)
        mask = mask.expand(rows, -1, positions.shape[1], -1)
        if sees is causal_mask_function:
            self._causal.append(mask)
        return mask

    def is_causal(self, mask: Tensor) -> bool:
        """True if a mask lets tokens see all those before them, and is of this batch."""
        return any(mask is causal for causal in self._causal)

    def repeated(self, mask: Tensor, heads: int, shared: int) -> Tensor:
        """`_repeat` of a mask, which layers share."""
        place = id(mask), shared
        if place not in self._repeated:
            self._repeated[place] = mask, _repeat(mask, heads, shared)
        return self._repeated[place][1]


class CurrentCache:
    """The cache of the batch that a part of a model is running on; all modules of it have this.

    Attributes:
        cache: None while the part does not run.
        last: int64 [rows, asked], which tokens of a batch have logits; None: all.
    """

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.last: Tensor | None = None

    @contextmanager
    def of(self, cache: PagedCache, last: Tensor | None) -> Iterator[None]:
        """Inside the `with` block the part runs on a batch."""
        self.cache, self.last = cache, last
        try:
            yield
        finally:
            self.cache = self.last = None

    def take_last(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """In front of the head of a model, drop tokens whose logits nobody asks for."""
        if self.last is None:
            return None
        (hidden,) = args
        last = self.last[:, :, None].expand(-1, -1, hidden.shape[-1])
        return (hidden.gather(1, last),)


@runtime_checkable
class _InPart(Protocol):
    """A module of a part that runs on pages."""

    current: CurrentCache


class MaskOfOthers:
    """Stands for a mask of other keys than those of a paged cache.

    Decoders of models with encoders make one for what an encoder gives, also where there is none.
    Then no module takes it.
    """


_OF_OTHERS = MaskOfOthers()


def paged_mask(
    *, kv_length: int, mask_function: Callable[..., Tensor], dtype: torch.dtype, **_: Any
) -> Tensor | MaskOfOthers:
    """A mask as transformers asks for one, of what a model's own function says that tokens see."""
    if not isinstance(kv_length, _Seen):
        return _OF_OTHERS
    return kv_length.cache.mask(mask_function, dtype)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskOfOthers | None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attend to keys of pages, as transformers asks for it.

    Soft caps, sinks and biases of positions are computed by the function that the model itself has
    for them.

    Args:
        module: that attends.
        query: [rows, heads, tokens, width].
        key, value: [rows, kv heads, keys, width], as the cache has given them.
        attention_mask: as `paged_mask` makes it.
        scaling: of the products.
        features: of the model's attention, and whatever else it passes on.

    Returns:
        [rows, tokens, heads, width of a value].

    Raises:
        ValueError: the module attends without a mask, so to whatever is in the pages; or to other
            keys than those of the cache, as to tokens that follow.
    """
    if isinstance(attention_mask, MaskOfOthers):
        raise ValueError(
            f"{type(module).__name__} attends to keys that are not in its cache, as a layer does "
            "that sees tokens ahead; if the model may be a decoder, its configuration says so by "
            "is_decoder"
        )
    if attention_mask is None:
        raise ValueError(f"{type(module).__name__} attends without a mask of causes")
    cache = module.current.cache if isinstance(module, _InPart) else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks, bias = (features.get(name) for name in ("softcap", "s_aux", "position_bias"))
    if cache is not None and cache.is_spread:
        if bias is not None:
            raise ValueError(
                f"{type(module).__name__} adds biases of positions, which ranks that share a "
                "sequence do not"
            )
        mixed = attend_spread(query, key, value, attention_mask, scale, cache, softcap or 0, sinks)
        return mixed.contiguous(), None
    if any(each is not None for each in (softcap, sinks, bias)):
        own: Any = sys.modules[type(module).__module__]
        mixed, _ = own.eager_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **features
        )
        return mixed, None
    return attend(query, key, value, attention_mask, scale, cache).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    cache: PagedCache | None,
) -> Tensor:
    """Attend by the fastest operators for the batch.

    Args:
        query: [rows, heads, tokens, width].
        key, value: [rows, kv heads, keys, width].
        mask: [rows, 1 or heads, tokens, keys].
        scale: of the products.
        cache: that has given keys, values and the mask, if one has.

    Returns:
        [rows, tokens, heads, width of a value].
    """
    if cache is not None and isinstance(cache.pages, SpreadPages):
        if cache.is_spread:
            return attend_spread(query, key, value, mask, scale, cache)
        return _attend_to_new(query, key, value, None if cache.is_causal(mask) else mask, scale)
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    shared = heads // groups
    if cache is not None and cache.pages.tables.numel():
        pages, own = cache.pages, None if cache.is_causal(mask) else mask
        layer = cache.layer_of(key, value) if value.shape[-1] == width else None
        if layer is not None and paged.is_served(query.device, shared * tokens, own):
            pool = pages.pool(layer).unflatten(-1, (2, width))
            grouped = query.reshape(rows, groups, shared * tokens, width)
            exponents = pages.exponents_of(layer)
            pools = (pool,) if exponents is None else (pool, exponents)
            seen = grouped, *pools, pages.blocks, pages.positions.flatten()
            mixed = paged.operator(exponents is not None, own is not None)(
                *seen, *(() if own is None else (own,)), scale
            )
            return mixed.reshape(rows, heads, tokens, width).transpose(1, 2)
    elif cache is not None and cache.is_causal(mask):
        return _attend_to_new(query, key, value, None, scale)
    # Heads that share keys are rows of one product: [rows, groups, shared * tokens, width].
    query = query.reshape(rows, groups, shared * tokens, width)
    if shared > 1:
        mask = (_repeat if cache is None else cache.repeated)(mask, heads, shared)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    if tokens == 1:  # a view, for products of matrices copy what has other strides
        return mixed.reshape(rows, 1, heads, value.shape[-1])
    return mixed.reshape(rows, heads, tokens, value.shape[-1]).transpose(1, 2)


def _attend_to_new(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend to the keys of a batch alone; without a mask, causally."""
    shared = query.shape[1] > key.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )
    return mixed.transpose(1, 2)


def attend_spread(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    cache: PagedCache,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys that lie on several ranks; `SpreadPages.attend` has the arguments.

    Raises:
        ValueError: a model has changed the keys, the values, or the mask that its cache has given.
    """
    layer = cache.layer_of(key, value)
    if layer is None or not isinstance(cache.pages, SpreadPages):
        raise ValueError("it changes keys or values, of which each rank has a part")
    own = None if cache.is_causal(mask) else mask
    if own is not None and own.shape[1] > 1:
        raise ValueError(
            "its mask differs from head to head, and ranks that share a sequence take one for all"
        )
    return cache.pages.attend(query, layer, own, scale, cap, sinks)


def _repeat(mask: Tensor, heads: int, shared: int) -> Tensor:
    """A mask for heads that share keys, whose tokens are rows of one product."""
    rows, several, tokens, keys = mask.shape
    if several > 1:
        return mask.expand(rows, heads, -1, -1).reshape(rows, -1, shared * tokens, keys)
    return mask if tokens == 1 else mask.repeat(1, 1, shared, 1)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, paged_mask)
