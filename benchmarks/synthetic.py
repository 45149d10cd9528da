"""Large traced modules made without tracing, to measure passes by."""

from __future__ import annotations

from collections.abc import Sequence

from cg.ir.attributes import Effect, Symbol
from cg.ir.ops import Backward, Call, Op, Return, Value, View
from cg.ir.ops.module import Function, Module, Program, Vjp
from cg.ir.phases import Phase
from cg.ir.types import DType, Place, TensorType, UnitType, relocate

_ROWS, _WIDTH = 2, 8
_HIDDEN = TensorType(DType.F32, (_ROWS, _WIDTH))
_SCALAR = TensorType(DType.F32, ())


def pipeline_module(
    ranks: int, microbatches: int, stage_ranks: Sequence[int] | None = None
) -> Module:
    """One training step of a pipeline, in phase TRACED.

    Each microbatch passes through `stage{i}.forward` of every stage and the loss of the last; the
    mean of the losses goes backward, and every stage then updates its weights. Inputs come to,
    and the loss is returned to, every rank.

    Args:
        ranks: how many there are.
        microbatches: how many, of each step.
        stage_ranks: the rank of each stage; one on each rank without.
    """
    homes = range(ranks) if stage_ranks is None else stage_ranks
    module = Module("step", Phase.TRACED, ranks)
    for stage in range(len(homes)):
        _declare_stage(module, stage)
    _declare_loss(module, len(homes) - 1)
    _declare_mean(module, microbatches)
    everywhere = module.everywhere
    batch = TensorType(DType.F32, (_ROWS * microbatches, _WIDTH), everywhere)
    x, y = Value("x", batch), Value("y", batch)
    ops: list[Op] = []
    losses = tuple(_microbatch(ops, x, y, homes, mb, everywhere) for mb in range(microbatches))
    last = Place.of(homes[-1])
    loss = Value("loss", relocate(_SCALAR, last))
    ops.append(Call(losses, (loss,), fn=Symbol("mean"), vjp=Symbol("mean.vjp")))
    ops.append(Backward((loss,)))
    for stage, rank in enumerate(homes):
        done = Value(f"update.{stage}", UnitType(Place.of(rank)))
        ops.append(Call((), (done,), fn=Symbol(f"stage{stage}.update")))
    ops.append(Return((loss,), at=everywhere))
    module.programs.append(Program("step", [x, y], ops))
    return module


def _microbatch(
    ops: list[Op], x: Value, y: Value, homes: Sequence[int], mb: int, everywhere: Place
) -> Value:
    part = relocate(_HIDDEN, everywhere)
    parts = []
    for source in (x, y):
        view = Value(f"{source.name}.{mb}", part)
        ops.append(View((source,), (view,), dim=0, start=mb * _ROWS, length=_ROWS, mb=mb))
        parts.append(view)
    hidden, target = parts
    for stage, rank in enumerate(homes):
        out = Value(f"h.{mb}.{stage}", relocate(_HIDDEN, Place.of(rank)))
        name = f"stage{stage}.forward"
        ops.append(Call((hidden,), (out,), fn=Symbol(name), vjp=Symbol(f"{name}.vjp"), mb=mb))
        hidden = out
    name = f"stage{len(homes) - 1}.loss"
    loss = Value(f"loss.{mb}", relocate(_SCALAR, Place.of(homes[-1])))
    ops.append(Call((hidden, target), (loss,), fn=Symbol(name), vjp=Symbol(f"{name}.vjp"), mb=mb))
    return loss


def _declare_stage(module: Module, stage: int) -> None:
    actor, name = f"stage{stage}", f"stage{stage}.forward"
    _declare(module, Function(name, (_HIDDEN,), (_HIDDEN,), effect=Effect.READ, actor=actor))
    forward = Function(
        f"{name}.fwd", (_HIDDEN,), (_HIDDEN, _HIDDEN), effect=Effect.READ, actor=actor
    )
    cotangent = UnitType() if stage == 0 else _HIDDEN
    backward = Function(
        f"{name}.bwd", (_HIDDEN, _HIDDEN), (cotangent,), effect=Effect.ACCUMULATE, actor=actor
    )
    grad_inputs = () if stage == 0 else (0,)
    weight = Function(
        f"{name}.w", backward.inputs, (UnitType(),), effect=Effect.ACCUMULATE, actor=actor
    )
    _declare(module, forward, backward, weight)
    # As a traced stage: the second half takes what is saved, and the cotangent.
    module.vjps[f"{name}.vjp"] = Vjp(
        f"{name}.vjp",
        forward.name,
        backward.name,
        (0,),
        grad_inputs,
        input=backward.name if stage else None,
        weight=weight.name if stage else backward.name,
        kept=(0, 1),
    )
    update = Function(f"{actor}.update", (), (UnitType(),), effect=Effect.WRITE, actor=actor)
    _declare(module, update)


def _declare_loss(module: Module, stage: int) -> None:
    actor, name = f"stage{stage}", f"stage{stage}.loss"
    inputs = (_HIDDEN, _HIDDEN)
    forward = Function(f"{name}.fwd", inputs, (_SCALAR, _HIDDEN), actor=actor)
    backward = Function(f"{name}.bwd", (_HIDDEN, _SCALAR), (_HIDDEN,), actor=actor)
    _declare(module, Function(name, inputs, (_SCALAR,), actor=actor), forward, backward)
    module.vjps[f"{name}.vjp"] = Vjp(f"{name}.vjp", forward.name, backward.name, (0,), (0,))


def _declare_mean(module: Module, count: int) -> None:
    inputs = (_SCALAR,) * count
    forward = Function("mean", inputs, (_SCALAR,))
    backward = Function("mean.bwd", (_SCALAR,), inputs)
    _declare(module, forward, backward)
    module.vjps["mean.vjp"] = Vjp("mean.vjp", "mean", "mean.bwd", (0,), tuple(range(count)))


def _declare(module: Module, *functions: Function) -> None:
    module.functions.update((function.name, function) for function in functions)
