"""A decode step over weights of 4 and 8 bits by its time in float16, on one GPU, in turns.

    python benchmarks/few_bits_gpu.py [--batch 1] [--layers 4] [--arms float16,awq,fp8]
        [--json FILE]
    CG_DEVICE=cpu python benchmarks/few_bits_gpu.py --device cpu      # a trial, small

The engine of examples/serve decodes with layers of Llama-3-8B's shapes, fused by TorchInductor, in
float16. Arms:

- float16: plain weights
- awq, gptq: 4 bits, with scales and zero points of 128 inputs
- fp8: float8 in blocks of 128 x 128, with inputs that are rounded for each call
- fp8-channel: float8 with a scale for each output, and inputs that are rounded by token

A figure is the median of the turns, and the record has all of them. The time of the head, which is
plain in all arms, is measured by itself. So a ratio is given of what was run, and one of 32 layers:
those of the arm and of float16, by layer, with the head added once. Weights are random.

`kernels` are products with the weights of a layer by themselves: microseconds on the device, GB/s
of the stored bytes, and how far values are from the dequantized product.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from one_gpu.decode import Steps
from one_gpu.qwen2 import Sizes
from provenance import provenance

from cg.launch.conversions.conversion import StoredType
from cg.launch.quantized.few_rows import product_of_few
from cg.launch.quantized.quantized_linear import QuantizedLinear
from cg.launch.quantized.readers import read_settings
from cg.launch.world import world as worlds
from cg.tracer.method.quantized.dequantize import dequantized
from cg.tracer.method.quantized.weight_format import WeightFormat
from examples.serve.decoders import decoder
from examples.serve.engine import start
from examples.serve.settings import Options

WARM, DEEP, PATIENCE = 3, 32, 170.0
"""Turns before those that count, layers of the model, seconds after which it says where it is."""
REAL = Sizes(32, 4096, 14336, 32, 8, 128_256, context=512, filled=256, batches=(1,), inner=40)
SMALL = Sizes(2, 256, 384, 4, 2, 512, context=64, filled=32, batches=(1,), inner=4)

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_FP8, "strategy": "channel"},
                "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
            }
        },
    },
}
ARMS = ("float16", *SETTINGS)


def format_of(arm: str) -> WeightFormat:
    chosen = read_settings(SETTINGS[arm]).choose("layer", ("Linear",))
    assert chosen is not None
    return chosen


def stored(arm: str, outputs: int, inputs: int) -> dict[str, StoredType]:
    """The tensors of a layer of an arm, by name."""
    weight_format = format_of(arm)
    integers = (weight_format.zero, weight_format.index)
    types = {}
    for name in weight_format.names:
        shapes = weight_format.shape(name, outputs, inputs)
        assert shapes is not None
        dtype = torch.float32 if arm == "fp8" else torch.float16
        if name == weight_format.weight and weight_format.packing is None:
            dtype = torch.float8_e4m3fn
        elif name == weight_format.weight or name in integers:
            dtype = torch.int32
        types[name] = StoredType(shapes[0], dtype)
    return types


def drawn(arm: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor such that weights are about as large as those of a model."""
    if name.endswith("g_idx"):
        return (torch.arange(shape[0], device=device) // 128).int()
    if dtype is torch.int32:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    if dtype is torch.float8_e4m3fn:
        return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(dtype)
    scale = 0.0002 if arm.startswith("fp8") else 0.003
    return (scale * (1 + torch.rand(shape, device=device))).to(dtype)


@dataclass(frozen=True)
class Random:
    """Random weights of an arm, as the engine takes weights; made on the device."""

    arm: str
    device: torch.device

    def prepare(self, model: nn.Module) -> frozenset[str]:
        if self.arm == "float16":
            return frozenset()
        names = []
        for path, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and "proj" in path:
                types = stored(self.arm, layer.out_features, layer.in_features)
                parent, _, name = path.rpartition(".")
                quantized = QuantizedLinear(layer, format_of(self.arm), types)
                setattr(model.get_submodule(parent), name, quantized)
                names += [f"{path}.{tensor}" for tensor in types]
        return frozenset(names)

    def load(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {}
        for name, like in parameters.items():
            shape = tuple(like.shape)
            if self.arm != "float16" and "proj" in name:
                tensor = drawn(self.arm, name, shape, like.dtype, self.device)
            else:
                noise = 0.02 * torch.randn(shape, device=self.device)
                tensor = (noise + (like.ndim == 1)).to(dtype)
            tensors[name] = tensor.cpu()
        return tensors


def engine_of(arm: str, sizes: Sizes, args: argparse.Namespace, device: torch.device) -> Any:
    """An engine that decodes greedily, with one variant of batches."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    options = Options(
        groups=1,
        batches=(args.batch,),
        chunks=(16,),
        blocks=1 + sizes.context // 16 * args.batch,
        context=sizes.context,
        widths=(),
        dtype=torch.float16 if device.type == "cuda" else torch.float32,
        fuse="inductor" if args.device == "cuda" else None,
        draws=False,
        late=True,  # one variant of chunks is enough
    )
    return start(decoder(config, Random(arm, device), None), options)


def per_call(
    run: Callable[[], object], device: torch.device, inner: int, repeats: int = 1
) -> float:
    """Milliseconds of one of the `inner` calls of a run, on the host's clock.

    It is read around repeated runs and a wait for the device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / (inner * repeats) * 1e3


def in_graph(runs: list[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Calls one behind the other, captured on a GPU."""

    def several() -> None:
        for run in runs:
            run()

    if device.type != "cuda":
        return several
    several()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return graph.replay


def products(args: argparse.Namespace, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Products with the weights of a layer, by arm; those of one input are joined, as served.

    Calls have weights of their own, more than a device's cache holds.
    """
    wide = sizes.hidden * sizes.groups // sizes.heads
    shapes = [(sizes.hidden + 2 * wide, sizes.hidden), (sizes.hidden, sizes.hidden)]
    shapes += [(2 * sizes.mlp, sizes.hidden), (sizes.hidden, sizes.mlp)]
    rows = []
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    for arm in args.arms:
        for outputs, inputs in shapes:
            x = torch.randn(args.batch, inputs, device=device, dtype=dtype)
            copies = max(3, int(6e8 // (outputs * inputs * 2))) if device.type == "cuda" else 2
            error, size = 0.0, outputs * inputs * 2
            runs: list[Callable[[], object]] = []
            for _ in range(copies):
                if arm == "float16":
                    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
                    runs.append(lambda x=x, weight=weight: nn.functional.linear(x, weight))
                    continue
                types = stored(arm, outputs, inputs)
                own = {
                    name: drawn(arm, name, kind.shape, kind.dtype, device)
                    for name, kind in types.items()
                }
                size = sum(tensor.nbytes for tensor in own.values())
                weight_format = format_of(arm)
                product = product_of_few(weight_format, own, x, outputs)
                if product is None:
                    assert device.type == "cpu", f"{arm} has no kernel here"
                    break
                if not runs:
                    weight = dequantized(weight_format, own, outputs, inputs)
                    right = x.double() @ weight.double().t()
                    error = float((product - right).norm() / right.norm())
                    assert error < 1e-3, f"{arm}, {outputs} x {inputs}: off by {error:.1e}"
                runs.append(
                    lambda own=own, x=x, f=weight_format, n=outputs: product_of_few(f, own, x, n)
                )
            if not runs:
                continue
            run = in_graph(runs, device)
            every = [per_call(run, device, copies, 20) for _ in range(WARM + args.turns)]
            several = [milliseconds * 1e3 for milliseconds in every[WARM:]]
            microseconds = statistics.median(several)
            rows.append(
                {
                    "arm": arm,
                    "shape": [outputs, inputs],
                    "us": microseconds,
                    "gb_per_s": size / microseconds / 1e3,
                    "error": error,
                    "samples": several,
                }
            )
            print(
                f"  {arm:12} {outputs:6} x {inputs:6} {microseconds:8.2f} us "
                f"{size / microseconds / 1e3:8.1f} GB/s, error {error:.1e}",
                flush=True,
            )
    return rows


def head_ms(sizes: Sizes, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Milliseconds of the head by itself, with the choice of the best token."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    weight = torch.randn(sizes.vocabulary, sizes.hidden, device=device, dtype=dtype)
    x = torch.randn(args.batch, sizes.hidden, device=device, dtype=dtype)
    run = in_graph([lambda: nn.functional.linear(x, weight).argmax(-1)] * 10, device)
    return [per_call(run, device, 10, 5) for _ in range(WARM + args.turns)][WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--layers", type=int, default=4)
    add("--turns", type=int, default=7)
    add("--arms", type=lambda text: text.split(","), default=["float16", "awq", "fp8"])
    add("--sections", type=lambda text: text.split(","), default=["kernels", "decode"])
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--json", type=Path)
    args = parser.parse_args()
    if set(args.arms) - {*ARMS} or args.arms[0] != "float16":
        parser.error(f"--arms are float16, and some of {', '.join(SETTINGS)} behind it")
    world: Any = worlds.world()
    if (world.device is None) != (args.device == "cpu"):
        sys.exit("this needs a GPU; or start with CG_DEVICE=cpu, and --device cpu")
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    device = torch.device("cpu") if args.device == "cpu" else world.device.torch_device
    sizes, began = (SMALL if args.device == "cpu" else REAL), time.perf_counter()
    args.layers = min(args.layers, sizes.layers)
    record: dict[str, Any] = {**provenance(), **vars(args), "json": None}
    with torch.no_grad():
        if "kernels" in args.sections:
            record["kernels"] = products(args, sizes, device)
        if "decode" in args.sections:
            record |= decode(args, sizes, device, began)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def decode(
    args: argparse.Namespace, sizes: Sizes, device: torch.device, began: float
) -> dict[str, Any]:
    """Milliseconds of a decode step by arm, in turns."""
    head = head_ms(sizes, args, device)
    engines, steps = [], {}
    for arm in args.arms:
        engines.append(engine_of(arm, sizes, args, device))
        steps[arm] = Steps(engines[-1], sizes, args.batch)
        print(f"  {arm} is ready after {time.perf_counter() - began:.1f} s", flush=True)
    samples: dict[str, list[float]] = {arm: [] for arm in steps}
    for turn in range(WARM + args.turns):
        for arm, run in steps.items():
            sample = per_call(run, device, sizes.inner)
            samples[arm] += [sample] if turn >= WARM else []
    medians = {arm: statistics.median(several) for arm, several in samples.items()}
    alone = statistics.median(head)

    def deep(arm: str) -> float:
        return (medians[arm] - alone) / args.layers * DEEP + alone

    for arm, median in medians.items():
        print(
            f"  {arm:12} {median:8.3f} ms, {median / medians['float16']:.3f} of float16; "
            f"with {DEEP} layers {deep(arm):8.3f} ms, {deep(arm) / deep('float16'):.3f}",
            flush=True,
        )
    for engine in engines:
        engine.close()
    print(f"  done after {time.perf_counter() - began:.1f} s, head {alone:.3f} ms", flush=True)
    return {"head_ms": head, "step_ms": samples, "deep_ms": {arm: deep(arm) for arm in medians}}


if __name__ == "__main__":
    main()
