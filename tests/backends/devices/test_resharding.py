"""The bytes that ranks copy for a change of layout, beside those of their messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cg.backends.fake.host_memory import on_host
from cg.ir.ops import Assemble
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.placement.fabrics import Fabrics

from .ranks import ThreadWorld, bound, on_ranks, pause

SIDE = 8
BYTES = SIDE * SIDE * 4
ROWS, COLUMNS, COPIES = "f32[8/*,8]@{0..1}", "f32[8,8/*]@{0..1}", "f32[8,8]@{0..1}"
EXECUTIONS = 5
"""Of which the first run as they are, and the last replay what was captured."""

CHANGES = {
    # There: what is sent is packed, and the own piece copied; back: the own one, and what comes.
    "rows to columns": (ROWS, COLUMNS, {0: 4 * BYTES // 4, 1: 4 * BYTES // 4}),
    "rows to copies": (ROWS, COPIES, {0: 0, 1: 0}),
    "one rank to rows": ("f32[8,8]@0", ROWS, {0: BYTES // 2, 1: 0}),
    "rows to the other rank": (ROWS, "f32[8,8]@1", {0: 0, 1: BYTES // 2}),
    "one rank to the other": ("f32[8,8]@0", "f32[8,8]@1", {0: 0, 1: 0}),
}
"""By name the types before and after, and for each rank the bytes that there and back it copies."""

COPIES_OF_ATEN = {
    *(torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat),
    *(torch.ops.aten._to_copy, torch.ops.aten._foreach_copy_),
}


class Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that torch copies on this thread."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES_OF_ATEN:
            # What is written into what is given comes first.
            into = args[0] if made is None else made
            self.nbytes += sum(t.nbytes for t in (into if isinstance(into, list) else [into]))
        return made


def compiled(before: str, after: str, fabrics: Fabrics | None) -> Module:
    """A step that brings a tensor from one layout to the other, and back."""
    one, other = (type_.partition("@")[0] for type_ in (before, after))
    place = before.partition("@")[2]
    # Only another layout is asked for: what is used at another rank is brought there anyway.
    there = "x" if one == other else "y"
    back = "a" if one == other else "z"
    asked = ("", "") if one == other else (
        f"%y = transfer(%x) : {after}", f"%z = transfer(%a) : {before}"
    )  # fmt: skip
    module = parse_module(f"""
module @m phase=traced world=2 {{
  function @there({other}) -> ({other})
  function @back({one}) -> ({one})
  function @take({one}) -> (unit) {{effect = write, kind = opaque}}
  program @m(%x: {before}) {{
    {asked[0]}
    %a = call(%{there}) {{fn = @there}} : {after}
    {asked[1]}
    %b = call(%{back}) {{fn = @back}} : {before}
    %u = call(%b) {{fn = @take}} : unit@{place}
    return() {{at = {{0}}}}
  }}
}}
""")
    PassManager(default_pipeline(fabrics=fabrics), verify=True).run(module)
    return module


def shares(type_: str) -> dict[int, tuple[slice, slice]]:
    """What each rank holds of a tensor of a type."""
    half, everything = SIDE // 2, slice(None)
    if type_ == ROWS:
        return {0: (slice(half), everything), 1: (slice(half, None), everything)}
    place = type_.partition("@")[2]
    return {int(rank): (everything, everything) for rank in ("01" if place == "{0..1}" else place)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_rank_copies_its_own_piece_and_what_is_not_contiguous(name: str) -> None:
    before, after, expected = CHANGES[name]
    module = compiled(before, after, Fabrics("fake+fake", "f32"))
    assert all(
        op.is_in_place for program in module.programs for op in program.ops
        if isinstance(op, Assemble)
    )  # fmt: skip
    held = shares(before)

    def play(world: ThreadWorld) -> tuple[int, list[torch.Tensor]]:
        taken: list[torch.Tensor] = []

        def take(x: torch.Tensor) -> tuple[None]:
            taken.append(torch.from_numpy(on_host(x).numpy().copy()))
            return (None,)

        bodies = {"there": lambda x: (x + 1.0,), "back": lambda x: (x * 2.0,), "take": take}
        executable = bound(world, module, bodies, delay=0.001)
        copied = 0
        for execution in range(EXECUTIONS):
            x = whole(execution)
            there = world.device.torch_device
            inputs = [x[held[world.rank]].to(there)] if world.rank in held else []
            with Copied() as counted:  # type: ignore[no-untyped-call]
                executable.run(inputs, pause)
            copied = copied if execution else counted.nbytes
            world.barrier()
        return copied, taken

    for rank, (copied, taken) in enumerate(on_ranks(2, play)):
        assert copied == expected[rank], f"rank {rank}"
        if rank in held:
            assert len(taken) == EXECUTIONS
            for execution, found in enumerate(taken):
                right = (whole(execution) + 1.0) * 2.0
                assert torch.equal(found, right[held[rank]]), f"rank {rank}, {execution}"


def whole(execution: int) -> torch.Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) + 100 * execution
