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

from torch import nn

from ...values.plan import Parts, Sharding, ShardingPlan, cut, whole

__all__ = ["hf"]


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
    "colwise_rep": _OUTPUTS,
    "colwise_gather_output": _OUTPUTS,
    "rowwise": _INPUTS,
    "rowwise_rep": _INPUTS,
    "rowwise_split_input": _INPUTS,
    "packed_colwise": Style(-2, blocks=2, bias=True),
    "packed_rowwise": Style(-1, blocks=2),
    "embedding_rowwise": Style(-2),
    "vocab_parallel_rowwise": Style(-2),
    "embedding_colwise": Style(-1),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
    "sequence_parallel": Style(),
}
"""The styles, by the names that transformers gives them."""

_GATHERED = frozenset({"colwise_rep", "colwise_gather_output"})

_BUILT_IN: Mapping[str, Mapping[str, Style]] = {
    "gpt2": {
        "wte": Style(-2),
        "h.*.attn.c_attn": Style(-2, blocks=3, bias=True),
        "h.*.attn.c_proj": _INPUTS,
        "h.*.mlp.c_fc": _OUTPUTS,
        "h.*.mlp.c_proj": _INPUTS,
        "lm_head": _OUTPUTS,
    }
}
"""Plans for models that bring no plan, by type of model."""

_KEYS = frozenset({"k_proj", "v_proj"})
_HEADS = frozenset({"q_proj", "o_proj", "attn.c_attn", "attn.c_proj"})
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds", "labels", "pixel_values")
"""Arguments of a model's `forward` with a row for each example."""


def hf(
    model: nn.Module, axis: str | tuple[str, str] = "tp", batch: str | None = "dp"
) -> ShardingPlan:
    """Make a plan for a model of transformers from the tensor parallel plan that it brings.

    ```python
    plan = cg.plans.hf(model) | cg.plan({"loss(ids)": cg.cut(0, "dp")})
    ```

    The plan names the model's tensors by their paths in the model, and finds them wherever the
    actor keeps the model. A stage may have only some of them. Arguments of a method `forward` with
    the names of the model's batched inputs are cut along the batch. All other arguments are whole,
    unless another plan, joined by `|`, names them. Where two plans name a tensor or an argument,
    the first plan counts. If the model's plan gathers the output of a layer, that layer is whole,
    except the layer that makes logits.

    Args:
        model: a model of transformers, such as `LlamaForCausalLM`; it may be on the meta device.
        axis: the axis of the mesh that cuts weights. If it has more ranks than the model has heads
            of keys, give two axes: the first cuts keys and values, both cut everything else.
        batch: the axis that cuts the rows of arguments; None: the arguments are whole.

    Returns:
        The plan.

    Raises:
        ValueError: the model brings no plan and none is built in; or a style of its plan is not
            known.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    shardings: dict[str, Sharding] = {}
    for key, style in _styles(model).items():
        for name, dims in _parameters(model, key):
            path = f"{_within_base(model, key)}.{name}" if name else _within_base(model, key)
            shardings[f"{path}|*.{path}"] = _sharding(model, key, style, dims, axes)
    if batch is not None:
        shardings |= {f"forward({name})": cut(0, batch) for name in _ROWS}
    return ShardingPlan.of(shardings, optional=type(model).__name__)


def _styles(model: nn.Module) -> dict[str, Style]:
    """The styles of layers, by path; `*` stands for a number in a path.

    Raises:
        ValueError: the model has no plan, or a style is not known.
    """
    config = _read(model, "config")
    prefix = _prefix(model)
    own = {f"{prefix}{k}": v for k, v in _names(_read(config, "base_model_tp_plan")).items()}
    own |= _names(_read(model, "_tp_plan"))
    if own:
        return {key: _style(model, key, name) for key, name in own.items()}
    kind = _read(config, "model_type")
    built_in = _BUILT_IN.get(kind) if isinstance(kind, str) else None
    if built_in is None:
        raise ValueError(
            f"{type(model).__name__} brings no tensor parallel plan (tp_plan), and cg has none for "
            "it; write one with cg.plan({path: cg.cut(...)})"
        )
    return {k if k == "lm_head" else f"{prefix}{k}": style for k, style in built_in.items()}


def _style(model: nn.Module, key: str, name: str) -> Style:
    style = _STYLES.get(name)
    if style is None:
        raise ValueError(
            f"the plan of {type(model).__name__} gives '{key}' the style '{name}', which cg does "
            f"not know; it knows {', '.join(_STYLES)}. Write a plan for it with cg.plan"
        )
    return Style() if name in _GATHERED and "*" in key else style


def _read(model_or_config: object, name: str) -> object:
    """An attribute of a model or its config; None if there is no such attribute."""
    return getattr(model_or_config, name, None)


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


def _parameters(model: nn.Module, key: str) -> Iterator[tuple[str, int]]:
    """The names and numbers of dimensions of the parameters of the layers at a path.

    If the path names a parameter itself, such as the weights of all experts, the name is empty.
    """
    dims_of: dict[str, int] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        generic = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
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
        if re.sub(r"(?<=\.)\d+(?=\.)", "*", path) == key:
            return type(module).__name__ == "Conv1D"
    return False
