"""Decoders of transformers, served by their own modules.

A part of a model runs the model's own forward, as `cg.cut_layers` cuts it, with a cache of pages
and an attention that reads them. So whatever layers do beside attention is the model's own code.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

import cg

from ..weight_files import quantization
from .attention import NAME, CurrentCache, PagedCache
from .lora import Adapter, adapter_cuts, attach, check_adapters, linear_shapes, must_run
from .pages import Pages
from .parts import Experts, KeyValues, Model, Quantized, Ways
from .products import Calls, join, project, replace_norms
from .start_check import ASKED, SHOWN, Trial
from .states import ObservedLayers, OtherState, Slots, State, StateName
from .weights import Stored, Weights, fill

log = logging.getLogger("serve")

LENGTH = 8
"""The tokens of the text on which a model is analysed."""
UNBOUNDED = 1 << 20
"""The context of a model that says none."""
CACHES = ("past_key_values", "cache_params")
"""Names by which forwards take a cache."""
FIXED_TURNS = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary positions whose angles do not depend on how long the sequence is."""


@runtime_checkable
class _StackedExperts(Protocol):
    """A module with the weights of all experts of a layer, by what transformers says of it."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def parameters(self) -> Iterator[nn.Parameter]: ...


class DecoderPart(nn.Module):
    """Layers of a decoder of transformers.

    Args:
        part: of the model, as `cg.cut_layers` makes it.
        is_first, is_last: which part it is.
        takes: the names of what the model's forward takes.
        states: that its layers keep of a sequence.
    """

    def __init__(
        self,
        part: Any,
        is_first: bool,
        is_last: bool,
        takes: frozenset[str],
        states: Mapping[StateName, State],
    ) -> None:
        super().__init__()
        self.part, self.is_first, self.is_last = part, is_first, is_last
        self.takes_positions, self.cache = "position_ids" in takes, _cache_of(takes)
        self.states, self.goes_on = states, True
        self.current = CurrentCache()
        for module in part.model.modules():
            module.current = self.current

    def drop_tokens(self) -> None:
        """From now on have the head of the last part take only tokens whose logits are wanted."""
        if self.is_last:
            head = self.part.model.get_output_embeddings()
            head.register_forward_pre_hook(self.current.take_last)

    def forward(self, x: Tensor, positions: Tensor, pages: Pages, last: Tensor | None) -> Tensor:
        """Apply the part, as `Part` says."""
        cache = PagedCache(pages)
        # Later parts read nothing of ids but their shape.
        ids = x if self.is_first else torch.zeros_like(positions)
        more = {self.cache: cache} | ({"position_ids": positions} if self.takes_positions else {})
        with self.current.of(cache, last):
            out = self.part(
                None if self.is_first else x,
                input_ids=ids,
                use_cache=True,
                **more,
            )
        pages.slots.keep()
        return out.logits if self.is_last else out

    def plainly(self, x: Tensor, ids: Tensor) -> Tensor:
        """Run the model's own forward on a text, without a cache or pages.

        Args:
            x: what the part takes, [1, tokens] or [1, tokens, hidden].
            ids: int64 [1, tokens].

        Returns:
            As `forward`, for all tokens.
        """
        _attend_by(self.part.model, "eager")
        try:
            out = self.part(None if self.is_first else x, input_ids=ids, use_cache=False)
        finally:
            _attend_by(self.part.model, NAME)
        return out.logits if self.is_last else out


class _Observer(PagedCache):
    """A cache that notes what layers give it, of one text that begins."""

    def __init__(self) -> None:
        positions, layers = torch.arange(LENGTH)[None], ObservedLayers()
        slots = Slots({}, positions[:, 0], None)
        super().__init__(Pages({}, 1, positions, positions, positions[:, :0], slots), layers)
        self.kept: dict[int, KeyValues] = {}
        self.states = layers.states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.dim() != 4 or key_states.shape[:3] != value_states.shape[:3]:
            raise ValueError(
                f"layer {layer_idx} keeps keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)}, which are not of heads and tokens"
            )
        self.kept[layer_idx] = KeyValues(
            key_states.shape[1], key_states.shape[3], value_states.shape[3]
        )
        return key_states, value_states


def stored_decoder(folder: Path, adapters: Sequence[Adapter] = ()) -> Model:
    """The model of a folder in transformers' format; see `open_model`."""
    config = AutoConfig.from_pretrained(folder)
    quantization(folder)
    weights = cg.pretrained(folder)
    model = _empty(config, torch.float32)
    quantized = cg.keep_quantized(model, weights)
    if weights.differing(model):
        # transformers does the same (`tie_weights`).
        config.tie_word_embeddings = False
        model = _empty(config, torch.float32)
        cg.keep_quantized(model, weights)
        if cg.rank() == 0:
            log.warning(
                "%s has a head that is not its embedding, so it is used, although config.json "
                "says tie_word_embeddings",
                folder,
            )
    return decoder(config, Stored(weights, model, quantized), _eos(folder), adapters)


def decoder(
    config: PretrainedConfig,
    weights: Weights,
    eos: int | list[int] | None,
    adapters: Sequence[Adapter] = (),
) -> Model:
    """The model of a configuration and weights.

    Raises:
        ValueError: the model has something that the engine does not serve, or an adapter is not of
            its layers.
    """
    model = _empty(config, torch.float32)
    name = f"{type(model).__name__} ({config.model_type})"
    takes = frozenset(inspect.signature(type(model).forward).parameters)
    head: Any = model.get_output_embeddings()
    observer = _Observer()
    try:
        _refuse(model, takes)
        cuts = cg.cut_layers(model, 1, "bytes", example=_example(takes, observer))
        count = len(cuts[0].layers)
        keeping = set(observer.kept) | {name.layer for name in observer.states}
        if not keeping or not keeping <= set(range(count)):
            raise ValueError(f"layers {sorted(keeping)} of {count} keep something of a sequence")
    except OtherState as error:
        raise ValueError(f"{name} is not served: {_mixer(model, error.layer)}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} is not served: {error}") from error
    check_adapters(adapters, linear_shapes(model))
    text: Any = config.get_text_config(decoder=True)
    layer_bytes = sum(cuts.costs.values[1:-1])
    context = min(_context(text), ASKED if observer.is_asked else UNBOUNDED)
    shown = context if observer.is_asked else min(context, SHOWN)

    def plan(layers: range, experts: str | None) -> Any:
        own = _empty(config, torch.float32).requires_grad_()
        weights.prepare(own)
        _attend_by(own, "eager")  # a plan may be derived from a run, and its backward
        whole = cg.plans.hf(own, batch=None, experts=experts)
        if not adapters:
            return whole
        part = _part(_empty(config, torch.float32), layers, count, takes).part.model
        return cg.plan(adapter_cuts(part, adapters, whole.of_tensor)) | whole

    def build(layers: range, dtype: torch.dtype, ways: Ways) -> nn.Module:
        whole = _empty(config, dtype)
        weights.prepare(whole)
        part = _part(whole, layers, count, takes)
        fill(part.part.model, weights, dtype)
        kept = {layer: observer.kept[layer] for layer in layers if layer in observer.kept}
        trial = Trial(part, kept, text.hidden_size, len(head.weight), shown, dtype, ways.cp)
        calls = Calls()
        with calls.of(part):
            trial.run_plainly()
        cut = plan(layers, None) if ways.tp > 1 else None
        join(part, calls, ways.tp, lambda path, sharding: _is_cut(cut, path, sharding))
        replace_norms(part)
        if ways.ranks == 1:
            project(part)
        part.drop_tokens()  # whatever module the head is by now
        attach(part.part.model, adapters, part.current, dtype)
        with must_run(part.part.model, adapters):
            part.goes_on = trial.compare(name)
        return part

    return Model(
        layers=count,
        heads=_heads(text, observer.kept),
        caches=observer.kept,
        states=observer.states,
        hidden=text.hidden_size,
        context=context,
        vocabulary=len(head.weight),
        layer=int(layer_bytes) // (count * head.weight.element_size()),
        quantized=_quantized(_empty(config, torch.float32), weights, count, _is_in_layer),
        eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        build=build,
        plan=plan,
        experts=_experts(_empty(config, torch.float32), weights, count),
        adapters=len(adapters),
    )


def _experts(model: Any, weights: Weights, layers: int) -> Experts | None:
    """The experts of a model; None if it has none that transformers stacks.

    Args:
        model: without memory; its layers become those whose tensors the weights have.
    """
    mixtures = [module for module in model.modules() if isinstance(module, _StackedExperts)]
    if not mixtures:
        return None
    paths = tuple(f"{path}." for path, module in model.named_modules() if module in mixtures)
    count = min(module.num_experts for module in mixtures)
    numbers = sum(p.numel() for module in mixtures for p in module.parameters())
    quantized = _quantized(model, weights, layers, lambda path: path.startswith(paths))
    return Experts(count, numbers // layers, quantized)


def _quantized(
    model: Any, weights: Weights, layers: int, is_counted: Callable[[str], bool]
) -> Quantized | None:
    """The weights of a model that stay quantized, on average of its layers; None: there are none.

    Args:
        model: without memory; its layers become those whose tensors the weights have.
        is_counted: by the path of a tensor.
    """
    plain = sum(p.numel() for path, p in model.named_parameters() if is_counted(path))
    names = weights.prepare(model)
    own = {path: p for path, p in model.named_parameters() if is_counted(path)}
    left = sum(p.numel() for path, p in own.items() if path not in names)
    size = sum(p.numel() * p.element_size() for path, p in own.items() if path in names)
    return Quantized((plain - left) // layers, size // layers) if size else None


def _is_in_layer(path: str) -> bool:
    """True if a path has a number in it, as those of what layers have."""
    return any(name.isdecimal() for name in path.split("."))


def _mixer(model: nn.Module, layer: Any) -> str:
    """The last of the modules that have a layer's number, in words."""
    named = [
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if vars(module).get("layer_idx") == layer
    ]
    return named[-1] if named else f"layer {layer}"


def _is_cut(plan: Any, path: str, sharding: Any) -> bool:
    """True if the ranks of a part share a tensor as a sharding says."""
    own = None if plan is None else plan.of_tensor(path)
    return (cg.whole if own is None else own).cuts == sharding.cuts


def _part(model: Any, layers: range, count: int, takes: frozenset[str]) -> DecoderPart:
    lengths = [n for n in (layers.start, len(layers), count - layers.stop) if n]
    index = 1 if layers.start else 0
    observer = _Observer()
    cuts = cg.cut_layers(model, lengths, "bytes", example=_example(takes, observer))
    states = {name: state for name, state in observer.states.items() if name.layer in layers}
    is_last = layers.stop == count
    return DecoderPart(cuts.part(index), layers.start == 0, is_last, takes, states)


def _example(takes: frozenset[str], observer: _Observer) -> dict[str, Any]:
    """Inputs on which a model is analysed: those that a part is given."""
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    inputs = {"input_ids": ids, _cache_of(takes): observer, "use_cache": True}
    return inputs | ({"position_ids": observer.pages.positions} if "position_ids" in takes else {})


def _cache_of(takes: frozenset[str]) -> str:
    """The name by which a forward takes its cache."""
    return next(name for name in CACHES if name in takes)


def _empty(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The model without weights, which attends by pages."""
    with cg.empty_weights():
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager"
        )
    model.requires_grad_(False).eval()
    _attend_by(model, NAME)
    return model


def _attend_by(model: nn.Module, name: str) -> None:
    """Have a model attend by an implementation that transformers knows by name."""
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = name


def _refuse(model: Any, takes: frozenset[str]) -> None:
    """Refuse models of which is known beforehand that pages cannot serve them.

    Raises:
        ValueError: the model is such a one.
    """
    if "input_ids" not in takes or takes.isdisjoint(CACHES):
        raise ValueError(
            f"its forward takes no input_ids, or no {' or '.join(CACHES)}, so it keeps something "
            "else"
        )
    if model.get_output_embeddings() is None:
        raise ValueError("it has no module that makes logits")
    for path, module in model.named_modules():
        kinds = [v for k, v in vars(module).items() if k.endswith("rope_type")]
        for kind in (k for k in kinds if isinstance(k, str) and k not in FIXED_TURNS):
            raise ValueError(
                f"{path} ({type(module).__name__}) makes rotary positions of type {kind!r}, which "
                f"depend on the length of the sequence; there are {', '.join(FIXED_TURNS)}"
            )


def _heads(text: Any, kept: Mapping[int, KeyValues]) -> int:
    """The most heads of queries that a configuration says; those of keys if it says none, or 1."""
    said = text.to_dict().get("num_attention_heads")
    numbers = said if isinstance(said, list) else [said]
    known = [number for number in numbers if isinstance(number, int)]
    return max([1, *known, *(layer.groups for layer in kept.values())])


def _context(text: Any) -> int:
    """The longest sequence that a configuration says; `UNBOUNDED` if it says none."""
    settings: Mapping[str, Any] = text.to_dict()
    names = "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
    lengths = [settings[name] for name in names if isinstance(settings.get(name), int)]
    return next(iter(lengths), UNBOUNDED)


def _eos(folder: Path) -> int | list[int] | None:
    """The tokens that end a text, as `generate` of transformers has them.

    They are those of generation_config.json; without this file, those of config.json.
    """
    try:
        return GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return GenerationConfig.from_pretrained(folder, "config.json").eos_token_id
