"""An arm of plain torch: transformers' model on the ranks of torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        benchmarks/finetuning/torch_arm.py ddp --compile --model DIR ...

It does not import cg.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetuning import torch_pipelines
from finetuning.meter import Meter
from finetuning.training import (
    CLIP,
    DECAY,
    RATE,
    batches,
    next_token_loss,
    options,
    trainers,
)

Step = Callable[[Tensor], Tensor | None]
"""Trains on tokens [batch, length] once; gives the loss of this rank's share, where it has one."""


def load(args: argparse.Namespace) -> Any:
    """The model on the host, weights in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    return model


def compile_layers(model: Any, args: argparse.Namespace) -> None:
    if args.compile:
        for layer in model.model.layers:
            layer.compile()


def own_parts(ids: Tensor, device: torch.device, microbatches: int) -> Sequence[Tensor]:
    """The microbatches of this rank's rows."""
    rows = ids.chunk(dist.get_world_size())[dist.get_rank()]
    return rows.to(device).chunk(microbatches)


# -- data parallel and fully sharded --------------------------------------------------------------


def ddp(args: argparse.Namespace, device: torch.device) -> Step:
    """Gradients are reduced in the last microbatch's backward."""
    model = load(args).to(device)
    compile_layers(model, args)
    replica = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    optimizer, rates = trainers(model.parameters(), RATE, DECAY, args.steps)

    def step(ids: Tensor) -> Tensor:
        parts = own_parts(ids, device, args.microbatches)
        losses = []
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else replica.no_sync():
                with torch.autocast(device.type, torch.bfloat16):
                    logits = replica(input_ids=part, use_cache=False).logits
                loss = next_token_loss(logits, part) / len(parts)
                loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update(optimizer, rates)
        return torch.stack(losses).sum()

    return step


def fsdp2(args: argparse.Namespace, device: torch.device) -> Step:
    """FSDP2 of each layer; its mixed precision takes the place of autocast.

    With `--once` weights stay gathered from the first microbatch to the last, and gradients are
    reduced behind the last. Otherwise each forward and each backward gathers them, and each
    backward reduces. With `--float8` linear layers but the head are torchao's, which are gathered
    in float8; their scales are computed for all of them behind the update.
    """
    model = load(args).to(device)
    rescale = float8_layers(model, device) if args.float8 else None
    compile_layers(model, args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stays: dict[str, Any] = {"reshard_after_forward": False} if args.once else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **stays)
    fully_shard(model, mesh=mesh, mp_policy=policy, **stays)
    optimizer, rates = trainers(model.parameters(), RATE, DECAY, args.steps)

    def step(ids: Tensor) -> Tensor:
        parts = own_parts(ids, device, args.microbatches)
        losses = []
        for part in parts:
            if args.once:
                is_last = part is parts[-1]
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            logits = model(input_ids=part, use_cache=False).logits
            loss = next_token_loss(logits, part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update(optimizer, rates)
        if rescale is not None:
            rescale(model)
        return torch.stack(losses).sum()

    return step


def float8_layers(model: Any, device: torch.device) -> Callable[[nn.Module], None]:
    """Replace linear layers but the head by torchao's; gives what computes their scales anew."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, path: path != "lm_head"
    )
    rescale: Callable[[nn.Module], None] = precompute_float8_dynamic_scale_for_fsdp
    return rescale


def update(optimizer: Any, rates: Any) -> None:
    """One step of the optimizer, and of what sets its rate."""
    optimizer.step()
    optimizer.zero_grad()
    rates.step()


# -- tensor parallel ------------------------------------------------------------------------------


def cut_by_dtensor(model: Any, mesh: DeviceMesh) -> None:
    """Heads, hidden units and the vocabulary are cut; embedding and head stay tied."""
    outputs, inputs = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        "model.embed_tokens": inputs(input_layouts=Replicate()),
        "lm_head": outputs(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = outputs()
    plan |= {f"model.layers.*.mlp.{name}": outputs() for name in ("gate_proj", "up_proj")}
    plan |= {f"model.layers.*.{name}": inputs() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = model.model.embed_tokens.weight


def tensor_parallel(args: argparse.Namespace, device: torch.device) -> Step:
    """DTensor's column and row parallel layers, and its loss over a vocabulary that is cut."""
    model = load(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    cut_by_dtensor(model, mesh)
    compile_layers(model, args)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": cut}, {"params": whole}]  # one kernel takes either, but not both
    optimizer, rates = trainers(groups, RATE, DECAY, args.steps)

    def step(ids: Tensor) -> Tensor:
        parts = ids.to(device).chunk(args.microbatches)
        losses = []
        for part in parts:
            with loss_parallel():
                with torch.autocast(device.type, torch.bfloat16):
                    logits = model(input_ids=part, use_cache=False).logits
                loss = next_token_loss(logits, part) / len(parts)
                loss.backward()
            losses.append(loss.detach())
        clip_both(cut, whole)
        update(optimizer, rates)
        total = torch.stack(losses).sum()
        return total.full_tensor() if isinstance(total, DTensor) else total

    return step


def clip_both(cut: Sequence[nn.Parameter], whole: Sequence[nn.Parameter]) -> None:
    """Clip by the norm of DTensors and of tensors that all ranks have, together."""
    norm_of = torch.nn.utils.get_total_norm
    norms = [norm_of([p.grad for p in each if p.grad is not None]) for each in (cut, whole)]
    parts = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    norm = torch.linalg.vector_norm(torch.stack(parts))
    for each in (cut, whole):
        torch.nn.utils.clip_grads_with_norm_(each, CLIP, norm)


# -- the arm --------------------------------------------------------------------------------------


def pipeline(args: argparse.Namespace, device: torch.device) -> Step:
    """torch.distributed.pipelining on manual stages."""
    model = load(args)
    compile_layers(model, args)
    if torch_pipelines.splits_backwards(args.schedule):
        functorch_config.donated_buffer = False  # else compiled layers refuse to keep their graph
    return torch_pipelines.make_step(model, args, device)


ARMS = {"ddp": ddp, "fsdp2": fsdp2, "tp": tensor_parallel, "pp": pipeline}


def join() -> torch.device:
    """Start torch.distributed on this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("--compile", action="store_true", help="layers, by TorchInductor")
    parser.add_argument("--once", action="store_true", help="fsdp2: gather and reduce once a step")
    parser.add_argument("--float8", action="store_true", help="fsdp2: by torchao, also gathers")
    parser.add_argument("--schedule", default="Schedule1F1B", help="pp: a class of torch's")
    args = parser.parse_args()
    device = join()
    train, tokens = ARMS[args.arm](args, device), batches(args)

    def step(number: int) -> float | None:
        loss = train(tokens[number])
        return None if loss is None else float(loss)

    Meter(args, dist.get_rank(), gather).run(step)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else a reducer of DDP over gloo can hang where Python destroys it


if __name__ == "__main__":
    main()
