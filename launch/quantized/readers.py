"""The formats of quantized layers, as configurations of folders name them.

| configuration | documented by |
|---|---|
| `fp8` | https://huggingface.co/docs/transformers/quantization/finegrained_fp8, DeepSeek-V3 |
| `compressed-tensors` | https://github.com/vllm-project/compressed-tensors |
| `gptq` | https://github.com/ModelCloud/GPTQModel, Frantar and others, "GPTQ", 2022 |
| `awq` | https://github.com/casper-hansen/AutoAWQ, Lin and others, "AWQ", 2023 |
| `bitsandbytes` | `functional.py` of https://github.com/bitsandbytes-foundation/bitsandbytes |
| `mxfp4` | OCP Microscaling Formats 1.0; `integrations/mxfp4.py` of transformers |
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...tracer.method.quantized.weight_format import (
    WORD,
    ActivationFormat,
    NestedScale,
    Packing,
    WeightFormat,
)

Settings: TypeAlias = Mapping[str, Any]
Choose: TypeAlias = Callable[[str, tuple[str, ...]], WeightFormat | None]
"""The format of a layer by its path and the names of its classes; None if it is not quantized."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's kernels have the neighbours of a word of 4 bits: even ones in its lower half."""


SETTINGS = ("quantization_config", "compression_config")
"""Where configurations describe quantized weights."""
READABLE = "Give a folder of the same model with weights in bfloat16, float16 or float32"
"""What helps wherever a format is not read."""


class FormatError(ValueError):
    """A format that is not read; the message says which, and what is read."""


@dataclass(frozen=True)
class QuantizedFolder:
    """The quantized layers of a folder, by its configuration.

    Attributes:
        method: the name of the format's library.
        choose: gives the format of a layer.
    """

    method: str
    choose: Choose


def quantization(folder: str | os.PathLike[str]) -> str | None:
    """The library in whose format a folder has quantized weights, by its config.json.

    It imports no torch, and reads no weights.

    Args:
        folder: as `save_pretrained` of transformers writes it.

    Returns:
        `quant_method` of the configuration; None if it says nothing of quantized weights, or if
        there is no readable configuration.

    Raises:
        ValueError: `keep_quantized` does not read the format.
    """
    quantized = quantized_folder(Path(folder))
    return None if quantized is None else quantized.method


def quantized_folder(folder: Path) -> QuantizedFolder | None:
    """The quantized layers of a folder, by its configuration; None if that names none.

    Raises:
        ValueError: the folder has them in a format that is not read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever reads the model says what is wrong
        return None
    known = config if isinstance(config, dict) else {}
    settings = next((known[name] for name in SETTINGS if known.get(name)), None)
    if not isinstance(settings, Mapping):
        return None
    try:
        return read_settings(settings)
    except FormatError as error:
        raise ValueError(
            f"the weights in {folder} are quantized: quantization_config in config.json: {error}. "
            f"{READABLE}"
        ) from error


def read_settings(settings: Settings) -> QuantizedFolder:
    """Read `quantization_config`.

    Raises:
        FormatError: the format is not read.
    """
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "no quant_method")
    if method not in _READERS:
        raise FormatError(f"the format {method!r} is not read; there are {', '.join(_READERS)}")
    return QuantizedFolder(method, _READERS[method](settings))


# -- fine-grained FP8 ------------------------------------------------------------------------------


def _fine_grained(settings: Settings) -> Choose:
    block = settings.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise _refused("fp8", "weight_block_size", block, "two sizes, such as [128, 128]")
    _only("fp8", settings, "fmt", ("e4m3", "float8_e4m3fn"))
    _only("fp8", settings, "scale_fmt", ("float", "ue8m0"))
    scheme = _only("fp8", settings, "activation_scheme", ("dynamic", "static"))
    outputs, inputs = map(int, block)
    weight_format = WeightFormat(
        f"fp8 in blocks of {outputs} x {inputs}",
        *("weight", "weight_scale_inv", outputs, inputs),
        activations=ActivationFormat(
            True,
            inputs,
            "activation_scale" if scheme == "static" else "",
            is_power=settings.get("scale_fmt") == "ue8m0",
        ),
    )
    return lambda path, classes: weight_format


# -- compressed-tensors ----------------------------------------------------------------------------

_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"


def _compressed(settings: Settings) -> Choose:
    for name in ("kv_cache_scheme", "transform_config"):
        if settings.get(name):
            raise _refused("compressed-tensors", name, settings[name], "nothing there")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused("compressed-tensors", "sparsity_config.format", sparsity, "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("compressed-tensors", "config_groups", groups, "groups of layers")
    ignored = tuple(settings.get("ignore") or ())
    formats = [
        (target, _of_group(name, group, settings))
        for name, group in groups.items()
        for target in group.get("targets", ())
    ]
    # Names before patterns, and patterns before classes, as the library has it.
    formats.sort(key=lambda entry: (entry[0].startswith("re:"), entry[0]))

    def choose(path: str, classes: tuple[str, ...]) -> WeightFormat | None:
        if any(_matches(target, path) or target in classes for target in ignored):
            return None
        by_name = (each for target, each in formats if _matches(target, path))
        by_class = (each for target, each in formats if target in classes)
        return next(by_name, None) or next(by_class, None)

    return choose


def _matches(target: str, path: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), path) is not None
    return target == path


def _of_group(name: str, group: Settings, settings: Settings) -> WeightFormat:
    """The format of a group of layers."""
    where = f"compressed-tensors, {name}"
    stored = group.get("format") or settings.get("format")
    weights = group.get("weights")
    if stored not in (*_PLAIN, _PACKED):
        raise _refused(where, "format", stored, ", ".join((*_PLAIN, _PACKED)))
    if not isinstance(weights, Mapping):
        raise _refused(where, "weights", weights, "a description")
    if group.get("output_activations"):
        raise _refused(where, "output_activations", "a description", "nothing there")
    bits, kind = int(weights.get("num_bits") or 0), weights.get("type", "int")
    widths = {"int": (4, 8)} if stored == _PACKED else {"int": (8,), "float": (8,)}
    if bits not in widths.get(kind, ()):
        raise _refused(
            where,
            "weights",
            f"{kind} of {bits} bits as {stored}",
            "8 bits, or packed int of 4 or 8",
        )
    outputs, inputs = _shared(where, weights)
    zero = "" if weights.get("symmetric", True) else "weight_zero_point"
    index = "weight_g_idx" if weights.get("actorder") == "group" else ""
    activations = _activations(where, group.get("input_activations"))
    words = f"{stored} of compressed-tensors"
    if stored != _PACKED:
        return WeightFormat(
            *(words, "weight", "weight_scale", outputs, inputs),
            zero=zero,
            index=index,
            by_index=bool(index),
            activations=activations,
        )
    return WeightFormat(
        *(f"{words}, {bits} bits", "weight_packed", "weight_scale", outputs, inputs),
        packing=Packing.in_order(bits, 1),
        zero=zero,
        zero_packing=Packing.in_order(bits, 0) if zero else None,
        offset=0 if zero else 1 << bits - 1,
        index=index,
        by_index=bool(index),
        kept=("weight_shape",),
        activations=activations,
    )


def _shared(where: str, weights: Settings) -> tuple[int, int]:
    """The outputs and inputs that share a scale."""
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "group" if group and group > 0 else "tensor"
    if strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, list | tuple) and len(block) == 2:
            return int(block[0]), int(block[1])
        raise _refused(where, "weights.block_structure", block, "two sizes")
    sizes = {"tensor": (0, 0), "channel": (1, 0), "group": (1, int(group or 0))}
    if strategy not in sizes or (strategy == "group" and not group):
        words = "tensor, channel, group with a size, block"
        raise _refused(where, "weights.strategy", strategy, words)
    return sizes[strategy]


def _activations(where: str, inputs: Settings | None) -> ActivationFormat | None:
    if not inputs:
        return None
    if inputs.get("num_bits") != 8 or not inputs.get("symmetric", True):
        raise _refused(where, "input_activations", dict(inputs), "8 bits, symmetric")
    is_float = inputs.get("type") == "float"
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic")
    if dynamic is True and strategy == "token":
        return ActivationFormat(is_float)
    if dynamic is True and strategy == "group" and inputs.get("group_size"):
        return ActivationFormat(is_float, int(inputs["group_size"]))
    if not dynamic and strategy in ("tensor", None):
        return ActivationFormat(is_float, scale="input_scale")
    raise _refused(
        where,
        "input_activations",
        f"strategy {strategy}, dynamic {dynamic}",
        "token or group where scales are dynamic, else tensor",
    )


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


def _gptq(settings: Settings) -> Choose:
    bits = settings.get("bits")
    if bits not in (2, 4, 8):
        raise _refused("gptq", "bits", bits, "2, 4 or 8")
    layouts = ("gptq", "gptq_v2")
    layout = _only("gptq", settings, "checkpoint_format", layouts)
    if settings.get("checkpoint_format") is None:
        layout = _only("gptq", settings, "format", layouts)
    _only("gptq", settings, "pack_dtype", ("int32",))
    if settings.get("dynamic"):
        raise _refused("gptq", "dynamic", "layers of their own", "one format for all layers")
    size = int(settings.get("group_size", -1))
    weight_format = WeightFormat(
        f"gptq, {bits} bits",
        *("qweight", "scales", 1, max(size, 0)),
        packing=Packing.in_order(bits, 0),
        zero="qzeros",
        zero_packing=Packing.in_order(bits, 1),
        offset=0 if layout == "gptq_v2" else 1,
        zero_wraps=True,
        index="g_idx",
        by_index=bool(settings.get("desc_act")),
        is_turned=True,
    )
    return lambda path, classes: weight_format


def _awq(settings: Settings) -> Choose:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise _refused("awq", "bits", bits, "4")
    for name in ("version", "format"):
        version = str(settings.get(name) or "gemm").lower()
        if version != "gemm":
            raise _refused("awq", name, version, "gemm")
    if not settings.get("zero_point", True):
        raise _refused("awq", "zero_point", False, "true")
    packing = Packing(bits, 1, AWQ_ORDER)
    assert len(AWQ_ORDER) == WORD // bits
    size = int(settings.get("group_size", settings.get("q_group_size", 128)))
    weight_format = WeightFormat(
        "awq, 4 bits",
        *("qweight", "scales", 1, max(size, 0)),
        packing=packing,
        zero="qzeros",
        zero_packing=packing,
        is_turned=True,
    )
    return lambda path, classes: weight_format


# -- bitsandbytes ----------------------------------------------------------------------------------


def _bitsandbytes(settings: Settings) -> Choose:
    """Which layers are quantized, and how large blocks are, the tensors of the folder say."""
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        weight_format = WeightFormat(
            "bitsandbytes, int8",
            *("weight", "SCB", 1, 0),
            steps=127.0,
            kept=("weight_format",),
            description="weight_format",
        )
        return lambda path, classes: weight_format
    kind = _only("bitsandbytes", settings, "bnb_4bit_quant_type", ("fp4", "nf4"))
    _only("bitsandbytes", settings, "bnb_4bit_quant_storage", ("uint8",))
    is_nested = bool(settings.get("bnb_4bit_use_double_quant"))
    description = f"weight_quant_state_bitsandbytes__{kind}"
    four_bits = WeightFormat(
        f"bitsandbytes, {kind}",
        *("weight", "weight_absmax", 1, 64),
        packing=Packing(4, 1, (1, 0)),  # the first of two has the upper bits
        table="weight_quant_map",
        nested=NestedScale("weight_nested_quant_map", "weight_nested_absmax", 256)
        if is_nested
        else None,
        kept=(description,),
        description=description,
        has_own_shapes=True,
    )
    return lambda path, classes: four_bits


def described(weight_format: WeightFormat, text: bytes, where: str) -> WeightFormat:
    """The format of a layer, with what bitsandbytes has written about it (`QuantState`).

    Args:
        weight_format: by the configuration.
        text: JSON (`QuantState`) of 4 bits; of 8 bits the number of a layout (`weight_format`).
        where: the layer, for errors.

    Raises:
        ValueError: the description is damaged, or of another format.
    """
    if weight_format.packing is None:
        if text != b"\0":
            raise ValueError(
                f"{where} has its numbers in the order of a kernel ({weight_format.name}, "
                f"weight_format {text[0]}), and what is read is 0, by rows: save the model with a "
                "newer bitsandbytes"
            )
        return weight_format
    try:
        state = json.loads(text)
        kind = state["quant_type"]
        if not weight_format.name.endswith(kind):
            raise ValueError(f"it is of {kind}")
        return _with_state(weight_format, state)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"the description of {where} is not one of {weight_format.name}: {error}. {READABLE}"
        ) from error


def _with_state(weight_format: WeightFormat, state: Settings) -> WeightFormat:
    nested = weight_format.nested
    if nested is not None:
        nested = replace(nested, run=state["nested_blocksize"], offset=state["nested_offset"])
    return replace(weight_format, inputs_per_scale=int(state["blocksize"]), nested=nested)


# -- mxfp4 -----------------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of float4_e2m1 that are not negative, by their bits."""


def _mxfp4(settings: Settings) -> Choose:
    """Microscaling formats of OCP: 32 numbers of 4 bits share a power of two."""
    weight_format = WeightFormat(
        "mxfp4",
        *("blocks", "scales", 1, 32),
        packing=Packing(4, 1, (0, 1)),
        numbers=(*E2M1, *(-number for number in E2M1)),
        scale_bias=127,
        has_own_shapes=True,
    )
    return lambda path, classes: weight_format


_READERS: Mapping[str, Callable[[Settings], Choose]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
"""By `quant_method`."""


def _only(method: str, settings: Settings, name: str, values: tuple[str, ...]) -> str:
    """A setting that has one of some values; the first one if it is not there."""
    value = settings.get(name)
    if value is None:
        return values[0]
    if value not in values:
        raise _refused(method, name, value, " or ".join(values))
    return str(value)


def _refused(method: str, name: str, value: Any, read: str) -> FormatError:
    return FormatError(f"{method} has {name} {value!r}, and what is read is {read}")
