"""Sharding plans for models of other libraries.

```python
model = LlamaForCausalLM(config)
plan = cg.plans.hf(model) | cg.plan({"loss(tokens)": cg.cut(0, "dp")})
stage = Stage.on(cg.mesh(dp=2, tp=2), plan=plan)(config)
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ...values.plan import AttentionForm, Parts, Sharding, ShardingPlan, cut, whole
from .derived_plans import derive
from .quantized_plans import of_quantized, plain_layers

__all__ = ["derived", "hf"]


@dataclass(frozen=True, slots=True)
class Style:
    """The way in which the weight of a layer is cut.

    Attributes:
        dim: the dimension of a weight of shape (outputs, inputs), counted from the end: -2 or -1;
            None: the weight is whole.
        blocks: the number of blocks that are packed in the dimension.
        bias: whether the bias is cut like the outputs. A bias that is added to a sum is whole.
    """

    dim: int | None = None
    blocks: int = 1
    bias: bool = False


_OUTPUTS = Style(-2, bias=True)
_INPUTS = Style(-1)
_STYLES: Mapping[str, Style] = {
    "colwise": _OUTPUTS,
    "colwise_rep": Style(),
    "colwise_gather_output": Style(),
    "rowwise": _INPUTS,
    "rowwise_rep": Style(),
    "rowwise_split_input": Style(),
    "packed_colwise": Style(-2, blocks=2, bias=True),
    "packed_rowwise": Style(-1, blocks=2),
    "embedding_rowwise": Style(-2),
    "vocab_parallel_rowwise": Style(-2),
    "embedding_colwise": Style(),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
    "mla_kv_a_proj": Style(),
    "sequence_parallel": Style(),
}
"""The styles, by the names that transformers gives them.

A layer is whole if its neighbours take, or give, whole tensors.
"""

_GATHERED = frozenset(
    {"colwise_rep", "colwise_gather_output", "rowwise_rep", "rowwise_split_input"}
)
"""Those of linear layers that are so. The layer that makes logits is cut along the vocabulary."""

_OF_EXPERTS = frozenset(
    {"moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts"}
)
"""Styles of modules that have the weights of experts. These stay whole."""

_OF_EXCHANGES = frozenset({"local_params", "all_reduce"})
"""Styles of modules that say what ranks exchange, which follows from the cuts of parameters."""

_NUMBER = r"(?<=\.)\d+(?=\.|$)"
"""A number that is a name in a path."""

_KEYS = frozenset({"k_proj", "v_proj"})
_HEADS = frozenset({"q_proj", "o_proj", "attn.c_attn", "attn.c_proj"})
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds", "labels", "pixel_values")
"""Arguments of a model's `forward` with a row for each example."""

_TOKENS = ("input_ids", "inputs_embeds")
"""Those that have a column for each token, of which a rank needs its own alone."""

_EXPERTS = ("has_gate", "has_bias", "is_transposed")
"""What transformers sets on a module that has the weights of all experts, stacked."""


def hf(
    model: nn.Module,
    axis: str | tuple[str, str] = "tp",
    batch: str | None = "dp",
    experts: str | None = None,
    sequence: str | tuple[str, ...] | None = None,
    attention: AttentionForm | None = None,
) -> ShardingPlan:
    """Make a plan for a model of transformers from the tensor parallel plan that it brings.

    ```python
    plan = cg.plans.hf(model) | cg.plan({"loss(ids)": cg.cut(0, "dp")})
    ```

    A model that brings none has the plan that `derived` makes. The plan names the model's tensors
    by their paths in the model, and finds them wherever the actor keeps the model. A stage may have
    only some of them. Arguments of a method `forward` with the names of the model's batched inputs
    are cut along the batch. All other arguments are whole, unless another plan, joined by `|`,
    names them. Where two plans name a tensor or an argument, the first plan counts. If the model's
    plan gathers the output of a layer, or splits its input, that layer is whole. The layer that
    makes logits is cut along the vocabulary.

    Args:
        model: a model of transformers, such as `LlamaForCausalLM`; it may be on the meta device.
        axis: the axis of the mesh that cuts weights. If it has more ranks than the model has heads
            of keys, give two axes: the first cuts keys and values, both cut everything else.
        batch: the axis that cuts the rows of arguments; None: the arguments are whole.
        experts: the axis over whose ranks experts are spread, with adapters that peft has given to
            their weights (`target_parameters`). It cuts the rows of arguments, too, behind `batch`.
            None: each rank has all experts.
        sequence: the axis that cuts the tokens of `input_ids` and `inputs_embeds`, and with them
            all that the model computes of them. Masks, positions and labels stay whole along it:
            each rank has them, and needs what is beyond its own tokens. An axis that cuts weights
            cuts tokens between their layers (sequence parallelism): there it leaves `input_ids`
            whole. Several axes, the major one first: those of weights last. None: no axis.
        attention: as `cg.plan` takes it.

    Returns:
        The plan.

    Raises:
        ValueError: a style of the model's plan is not known; or it brings no plan, and its forward
            cannot be traced; or `experts` is an axis, and the model has none.
    """
    names = _names_of(model)
    if not names:
        return derived(model, axis, batch, experts, sequence, attention)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    modules = tuple(key for key, name in names.items() if name in _OF_EXPERTS)
    shardings: dict[str, Sharding] = {}
    with plain_layers(model) as quantized:
        for key, name in names.items():
            of_experts = key.startswith(tuple(f"{m}." for m in modules))
            if name in _OF_EXPERTS | _OF_EXCHANGES or of_experts:
                continue
            style = _style(model, key, name)
            for parameter, dims in _parameters(model, key):
                path = f"{_within_base(model, key)}.{parameter}".removesuffix(".")
                shardings[path] = _sharding(model, key, style, dims, axes)
    shardings = of_quantized(shardings, quantized, partial(_generic, model))
    notes = [f"{_within_base(model, key)}: each rank has all experts" for key in modules]
    stay = tuple(notes) if experts is None else ()
    arguments = _ArgumentCuts.of(batch, experts, sequence, axes)
    return _plan(model, shardings, arguments, stay, attention)


def derived(
    model: nn.Module,
    axis: str | tuple[str, str] = "tp",
    batch: str | None = "dp",
    experts: str | None = None,
    sequence: str | tuple[str, ...] | None = None,
    attention: AttentionForm | None = None,
    *,
    example: Mapping[str, Any] | None = None,
) -> ShardingPlan:
    """Derive a plan from a model, whether it brings one or not.

    ```python
    print(cg.plans.derived(model))  # Python to edit, with what stays whole, and why
    ```

    The model's forward is traced once. A projection that leads to one other alone, such as queries,
    keys and values to the output of attention, is cut along its outputs, and the other one along
    its inputs, as Megatron-LM does (https://arxiv.org/abs/1909.08053). Packed projections are cut
    block by block where the blocks are equal. Heads are never cut. A projection that makes logits
    is cut along the vocabulary, and so is an embedding of as many rows. The rules of layouts then
    say whether the graph can be cut so; what cannot is whole.

    Args:
        model: a model of transformers, or another one with an `example`; it may be on the meta
            device. Its equal layers are cut alike, so one with few layers is as good, and faster.
        axis, batch, experts, sequence, attention: as `hf` takes them.
        example: inputs by name, on which the model is traced; None: a text.

    Returns:
        The plan, whose `str` is Python.

    Raises:
        ValueError: the model's forward cannot be traced, or nothing of it can be cut; or `experts`
            is an axis, and the model has none.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    with plain_layers(model) as quantized:
        shardings, reasons = derive(model, axes, example)
    if not shardings:
        why = "; ".join(reasons) or "no projection leads to one other alone"
        raise ValueError(f"nothing of {type(model).__name__} can be cut along {axes[0]}: {why}")
    own = {_within_base(model, path): sharding for path, sharding in shardings.items()}
    own = of_quantized(own, quantized, partial(_generic, model))
    notes = tuple(f"whole: {reason}" for reason in reasons)
    arguments = _ArgumentCuts.of(batch, experts, sequence, axes)
    return _plan(model, own, arguments, notes, attention)


@dataclass(frozen=True, slots=True)
class _ArgumentCuts:
    """The axes that cut arguments of a model's `forward`; None: no axis does.

    Attributes:
        batch, experts: those that cut rows.
        tokens: those that cut tokens, and no weights.
        between: those that cut tokens between the layers whose weights they cut.
    """

    batch: str | None
    experts: str | None
    tokens: tuple[str, ...]
    between: tuple[str, ...]

    @staticmethod
    def of(
        batch: str | None,
        experts: str | None,
        sequence: str | tuple[str, ...] | None,
        axes: tuple[str, ...],
    ) -> _ArgumentCuts:
        """The axes of a plan whose weights are cut along `axes`; the others are as `hf` takes them.

        Raises:
            ValueError: an axis that cuts weights stands in front of one that does not.
        """
        names = (sequence,) if isinstance(sequence, str) else tuple(sequence or ())
        tokens = tuple(axis for axis in names if axis not in axes)
        between = tuple(axis for axis in names if axis in axes)
        if names != (*tokens, *between):
            order = ", ".join(f"'{axis}'" for axis in (*tokens, *between))
            raise ValueError(f"axes of sequence= that cut weights stand last: give ({order})")
        return _ArgumentCuts(batch, experts, tokens, between)

    def sharding(self, name: str) -> Sharding:
        """The cuts of an argument."""
        rows = [axis for axis in (self.batch, self.experts) if axis is not None]
        sharding = cut(0, *rows) if rows else whole
        axes = self.tokens if name == "input_ids" else (*self.tokens, *self.between)
        return sharding & cut(1, *axes) if axes and name in _TOKENS else sharding


def _plan(
    model: nn.Module,
    shardings: Mapping[str, Sharding],
    arguments: _ArgumentCuts,
    notes: tuple[str, ...],
    attention: AttentionForm | None,
) -> ShardingPlan:
    """The plan of parameters, wherever an actor keeps the model, and of its arguments."""
    if arguments.experts is not None:
        shardings = {**shardings, **_of_experts(model, arguments.experts)}
    patterns = {f"*{path}": sharding for path, sharding in shardings.items()}
    cuts = {f"forward({name})": arguments.sharding(name) for name in _ROWS}
    patterns |= {key: sharding for key, sharding in cuts.items() if sharding != whole}
    name = type(model).__name__
    return ShardingPlan.of(
        patterns, optional=name, notes=notes, attention=attention, sequence=arguments.between
    )


def _of_experts(model: nn.Module, axis: str) -> dict[str, Sharding]:
    """The cuts of parameters that have all experts stacked, and of their adapters by peft.

    Raises:
        ValueError: there are none.
    """
    shardings: dict[str, Sharding] = {}
    for path, module in model.named_modules():
        prefix = _generic(model, path)
        cuts = _cuts_of_experts(module, axis) | _cuts_of_adapters(module, axis)
        shardings |= {f"{prefix}.{name}": sharding for name, sharding in cuts.items()}
    if not shardings:
        raise ValueError(
            f"{type(model).__name__} has no module with the weights of experts in the form of "
            "transformers; leave out experts=, or add cuts of your own by cg.plan"
        )
    return dict(sorted(shardings.items()))


def _cuts_of_experts(module: nn.Module, axis: str) -> dict[str, Sharding]:
    """By the names of parameters; none, if the module is not one of experts."""
    if any(_read(module, flag) is None for flag in _EXPERTS):
        return {}
    return {name: cut(0, axis) for name, _ in module.named_parameters()}


def _cuts_of_adapters(module: nn.Module, axis: str) -> dict[str, Sharding]:
    """By the names of parameters; none, if the module does not adapt stacked parameters.

    The factors of all experts are in one matrix each. Rows of the first one are those of expert
    after expert. Columns of the second one have the experts for each number of the rank.
    """
    count = _read(module, "num_experts")
    if _read(module, "parameter_name") is None or not isinstance(count, int) or count == 1:
        return {}
    return {
        name: cut(0, axis)
        if name.startswith("lora_A.")
        else cut(1, axis, blocks=p.shape[1] // count)
        for name, p in module.named_parameters()
        if name.startswith(("lora_A.", "lora_B."))
    }


def _names_of(model: nn.Module) -> dict[str, str]:
    """The names of the styles of layers, by path; `*` stands for a number in a path."""
    config, prefix = _read(model, "config"), _prefix(model)
    own = {f"{prefix}{k}": v for k, v in _names(_read(config, "base_model_tp_plan")).items()}
    return own | _names(_read(model, "_tp_plan"))


def _style(model: nn.Module, key: str, name: str) -> Style:
    style = _STYLES.get(name)
    if style is None:
        raise ValueError(
            f"the plan of {type(model).__name__} gives '{key}' the style '{name}', which cg does "
            f"not know; it knows {', '.join(_STYLES)}. Write a plan for it with cg.plan, or take "
            "cg.plans.derived(model)"
        )
    return _OUTPUTS if name in _GATHERED and _makes_logits(model, key) else style


def _makes_logits(model: nn.Module, key: str) -> bool:
    """Whether a layer is a single one behind the base model, and no repeated layer."""
    base = _prefix(model)
    return "*" not in key and not (base and key.startswith(base))


def _read(source: object, name: str) -> object:
    """An attribute of a model, its config or a module; None if there is no such attribute."""
    return getattr(source, name, None)


def _names(value: object) -> dict[str, str]:
    """The names of the styles in the plan of a model, by path."""
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _prefix(model: nn.Module) -> str:
    """The path of the base model in a model with a head, and a dot; empty for other models."""
    name = _read(model, "base_model_prefix")
    return f"{name}." if isinstance(name, str) and _read(model, name) is not None else ""


def _within_base(model: nn.Module, key: str) -> str:
    """The path of a layer in the base model, since a stage has layers without the base model."""
    return key.removeprefix(_prefix(model))


def _generic(model: nn.Module, path: str) -> str:
    """The path of a module in the base model, with `*` for numbers."""
    return _within_base(model, re.sub(_NUMBER, "*", path))


def _parameters(model: nn.Module, key: str) -> Iterator[tuple[str, int]]:
    """The names and numbers of dimensions of the parameters of the layers at a path.

    If the path names a parameter itself, such as the weights of all experts, the name is empty.
    """
    dims_of: dict[str, int] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        generic = re.sub(_NUMBER, "*", path)
        layer, _, name = generic.rpartition(".")
        if layer == key:
            dims_of.setdefault(name, parameter.dim())
        elif generic == key:
            dims_of.setdefault("", parameter.dim())
    yield from dims_of.items()


def _sharding(
    model: nn.Module, key: str, style: Style, dims: int, axes: tuple[str, ...]
) -> Sharding:
    """The sharding of a weight or a bias of a layer."""
    if style.dim is None or (dims == 1 and not style.bias):
        return whole
    *_, parent, last = ("", *key.split("."))
    is_keys = last in _KEYS
    used = axes[:1] if is_keys else axes
    dim = 0 if dims == 1 else dims + style.dim
    if dims == 2 and _is_transposed(model, key):
        dim = 1 - dim
    sharding = cut(dim, *used, blocks=style.blocks)
    config = _read(model, "config")
    count = _read(config, "num_attention_heads")
    if is_keys:
        count = _read(config, "num_key_value_heads") or count
    if not isinstance(count, int) or not ({last, f"{parent}.{last}"} & (_KEYS | _HEADS)):
        return sharding
    remedy = (
        f"make two axes of '{axes[0]}', such as cg.mesh(kv={count}, rep=...), and give "
        'cg.plans.hf(model, axis=("kv", "rep"))'
        if is_keys
        else "use an axis whose size divides the number of heads"
    )
    part_name = "heads of keys and values" if is_keys else "heads"
    return Sharding(sharding.cuts, (Parts(used, count, part_name, remedy),))


def _is_transposed(model: nn.Module, key: str) -> bool:
    """True if the weights of a layer have the shape (inputs, outputs), as in GPT-2."""
    for path, module in model.named_modules():
        if re.sub(_NUMBER, "*", path) == key:
            return type(module).__name__ == "Conv1D"
    return False
