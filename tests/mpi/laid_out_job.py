"""A tensor that ranks hold uneven pieces of, in processes of their own.

mpiexec -n 3 python -m tests.mpi.laid_out_job
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import cg
from cg.backends.program.linked import LinkedModule
from cg.ir.layout import Region
from cg.ir.text.parser import parse_module
from cg.ir.types import TensorType
from cg.launch.runtime.numbering import Numbering
from cg.launch.runtime.runtime import make_runtime
from cg.launch.world.world import world
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

STEP = """module @step phase=traced world=3 {
  mesh @m {dp = 3, ranks = {0..2}}
  function @rows(f32[7/dp,4]) -> (f32[7/dp,4], f32[4|+dp]) {effect = write, kind = opaque}
  function @columns(f32[7,4/dp]) -> (unit) {effect = write, kind = opaque}
  function @sums(f32[4]) -> (unit) {effect = write, kind = opaque}
  function @halves(f32[7/*,4]) -> (unit) {effect = write, kind = opaque}
  program @step(%x: f32[7/dp,4]@m) {
    %h, %s = call(%x) {fn = @rows} : f32[7/dp,4]@m, f32[4|+dp]@m
    %c = transfer(%h) : f32[7,4/dp]@m
    %u = call(%c) {fn = @columns} : unit@m
    %t = transfer(%s) : f32[4]@m
    %v = call(%t) {fn = @sums} : unit@m
    %e = transfer(%h) : f32[7/*,4]@{0..1}
    %w = call(%e) {fn = @halves} : unit@{0..1}
    %all = transfer(%h) : f32[7,4]@m
    return(%all) {at = {0..2}}
  }
}
"""
WHOLE = torch.arange(28.0).view(7, 4)


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, ((start, stop),) in enumerate(region):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor.clone()


def main() -> None:
    here = world()
    module = parse_module(STEP)
    types = {v.name: v.type for op in module.program.ops for v in op.results}
    x = module.program.params[0].type
    assert isinstance(x, TensorType)
    piece = part(WHOLE, x.region(here.rank))
    seen: dict[str, int] = dict.fromkeys(("columns", "sums", "halves"), 0)

    def expect(name: str, value: str, expected: torch.Tensor) -> Any:
        def run(found: torch.Tensor) -> Sequence[None]:
            type_ = types[value]
            assert isinstance(type_, TensorType)
            mine = part(expected, type_.region(here.rank))
            torch.testing.assert_close(found, mine, rtol=0, atol=0)
            seen[name] += 1
            return (None,)

        return run

    bodies = {
        "rows": lambda rows: (rows * 2, rows.sum(0)),
        "columns": expect("columns", "c", WHOLE * 2),
        "sums": expect("sums", "t", WHOLE.sum(0)),
        "halves": expect("halves", "e", WHOLE * 2),
    }
    PassManager(default_pipeline(), verify=True).run(module)
    linked = LinkedModule(module, bodies, {})
    runtime = make_runtime(here, linked, ["x"], timeout=60, numbering=Numbering(), call=None)
    for _ in range(3):
        (whole,) = runtime.run(lambda: [piece])
        torch.testing.assert_close(whole, WHOLE * 2, rtol=0, atol=0)
    runtime.close()
    assert seen == {"columns": 3, "sums": 3, "halves": 3 if here.rank < 2 else 0}, seen
    print(f"rank {cg.rank()}: held as it should be", flush=True)


if __name__ == "__main__":
    main()
