"""Rows of experts travel between devices beside the next task: all rows, none waits for ids."""

from __future__ import annotations

import pytest
import torch

from cg.backends.fake.host_memory import on_host
from cg.ir.ops import Call, Collective, RowCollective
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.placement.fabrics import Fabrics

from .ranks import ThreadWorld, bound, on_ranks, pause

MICROBATCHES, ROWS, WIDTH, EXECUTIONS = 3, 4, 8, 5
FABRICS = Fabrics("fake+fake", "f32")


def traced() -> Module:
    """A layer of experts on two ranks, for each microbatch."""
    cut, whole, place = f"f32[{ROWS}/*,{WIDTH}]", f"f32[{ROWS},{WIDTH}]", "@{0..1}"
    ids, routed = f"i64[{ROWS},2]", "experts = {[0:4], [4:8]}, lead = 1"
    calls = "".join(
        f"""
    %h{mb}, %i{mb} = call(%x{mb}) {{fn = @route, mb = {mb}}} : {cut}{place}, {ids}{place}
    %g{mb} = transfer(%h{mb}, %i{mb}) {{{routed}, mb = {mb}}} : {whole}{place}
    %p{mb} = call(%g{mb}, %i{mb}) {{fn = @experts, mb = {mb}}} : {whole[:-1]}|+*]{place}
    %z{mb} = transfer(%p{mb}, %i{mb}) {{{routed}, mb = {mb}}} : {cut}{place}
    %o{mb} = call(%z{mb}) {{fn = @add, mb = {mb}}} : {cut}{place}"""
        for mb in range(MICROBATCHES)
    )
    outputs = ", ".join(f"%o{mb}" for mb in range(MICROBATCHES))
    return parse_module(f"""
module @m phase=traced world=2 {{
  function @route({cut}) -> ({cut}, {ids}) {{actor = a, effect = read}}
  function @experts({whole}, {ids}) -> ({whole[:-1]}|+*]) {{actor = a, effect = read}}
  function @add({cut}) -> ({cut}) {{actor = a, effect = read}}
  function @take({", ".join([cut] * MICROBATCHES)}) -> (unit) {{effect = write, kind = opaque}}
  program @m({", ".join(f"%x{mb}: {cut}{place}" for mb in range(MICROBATCHES))}) {{{calls}
    %u = call({outputs}) {{fn = @take}} : unit{place}
    return() {{at = {{0}}}}
  }}
}}
""")


def compiled(tasks: int, dispatch: str = "auto") -> Module:
    module = traced()
    pipeline = default_pipeline(fabrics=FABRICS, dispatch=dispatch, tasks_in_flight=tasks)
    PassManager(pipeline, verify=True).run(module)
    return module


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_devices_compute_the_same_with_more_tasks_in_flight(tasks: int) -> None:
    """The last executions replay what the first have captured."""
    module = compiled(tasks)
    for program in module.programs:
        moved = [op for op in program.ops if isinstance(op, Collective)]
        assert len(moved) == 2 * MICROBATCHES
        assert not any(isinstance(op, RowCollective) for op in moved)
        begun = [op.mb for op in program.ops if isinstance(op, Call) and op.fn.name == "route"]
        first = next(
            index
            for index, op in enumerate(program.ops)
            if isinstance(op, Call) and op.fn.name == "experts"
        )
        ahead = [op for op in program.ops[:first] if isinstance(op, Call)]
        assert begun == list(range(MICROBATCHES))
        assert [op.fn.name for op in ahead] == ["route"] * min(tasks, 2), (
            "experts come as soon as rows are there"
        )

    def play(world: ThreadWorld) -> list[list[torch.Tensor]]:
        taken: list[list[torch.Tensor]] = []

        def take(*parts: torch.Tensor) -> tuple[None]:
            taken.append([torch.from_numpy(on_host(part).numpy().copy()) for part in parts])
            return (None,)

        bodies = {
            "route": lambda x: (x + 1.0, torch.zeros(ROWS, 2, dtype=torch.int64, device=x.device)),
            "experts": lambda h, _: (h * (world.rank + 1.0),),
            "add": lambda z: (z * 2.0,),
            "take": take,
        }
        executable = bound(world, module, bodies, delay=0.001)
        for execution in range(EXECUTIONS):
            parts = [part.to(world.device.torch_device) for part in pieces(execution, world.rank)]
            executable.run(parts, pause)
            world.barrier()
        return taken

    for rank, taken in enumerate(on_ranks(2, play)):
        assert len(taken) == EXECUTIONS
        for execution, parts in enumerate(taken):
            for part, x in zip(parts, pieces(execution, rank), strict=True):
                assert torch.equal(part, (x + 1.0) * 3.0 * 2.0), f"rank {rank}, {execution}"


def pieces(execution: int, rank: int) -> list[torch.Tensor]:
    """A rank's rows of each microbatch."""
    count = ROWS // 2 * WIDTH
    x = torch.arange(count, dtype=torch.float32).reshape(ROWS // 2, WIDTH)
    return [x + 100 * execution + 1000 * mb + count * rank for mb in range(MICROBATCHES)]


def test_rows_of_devices_are_not_exchanged() -> None:
    with pytest.raises(IRError, match="rank 0 has a device, whose host would have to wait"):
        compiled(2, "exchange")
