"""The cases of the suite of communicators, for each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from cg.ir.types import DType, TensorType

from .conformance import Case
from .laid_out_cases import programs

WORLDS = (2, 4)
"""Numbers of ranks for which there is the whole suite."""


def cases(worlds: Sequence[int] = WORLDS) -> Iterator[Case]:
    """All of them, for each number of ranks; the number is in the name."""
    for world in worlds:
        for case in (*messages(world), *collectives(world), *layouts(world)):
            yield replace(case, name=f"{case.name}@{world}")


def messages(world: int) -> Iterator[Case]:
    """Point-to-point."""
    for dtype in DType:
        yield one_way(f"message-{dtype.value}", f"{dtype.value}[5,3]", world)
    for shape in ("f32[]", "f32[0,4]", "u8[1]", "f32[300,1000]"):
        yield one_way(f"message-{shape}", shape, world)
    yield one_way("message-object", "object", world, objects=True)
    yield dense(world)
    yield pipeline("pipeline", world, 6)
    yield exchange(world)
    yield ring(world)
    yield columns(world)


def one_way(
    name: str, type_: str, world: int, given: str | None = None, objects: bool = False
) -> Case:
    """Each rank but the last sends what it is given to the next, which returns it.

    Args:
        given: what a rank is given where it sends only a part of that.
    """
    lines = [f"module @m phase=scheduled world={world} {{"]
    lines += [f"  channel {rank} {{ranks = {{{rank},{rank + 1}}}}}" for rank in range(world - 1)]
    part = f"    %x = view(%whole) {{dim = 1, length = 2, start = 3}} : {type_}"
    param = f"%x: {type_}" if given is None else f"%whole: {given}"
    for rank in range(world):
        sends, receives = rank < world - 1, rank > 0
        lines.append(f"  program @{rank}({param if sends else ''}) {{")
        if receives:
            come = f"recv() {{chan = {rank - 1}, peer = {rank - 1}, seq = 0}}"
            lines.append(f"    %r = {come} : future<{type_}>")
        if sends:
            go = f"send(%x) {{chan = {rank}, peer = {rank + 1}, seq = 0}}"
            lines += [part] if given is not None else []
            lines += [f"    %s = {go} : future<unit>", "    wait(%s)"]
        lines += [f"    %v = wait(%r) : {type_}"] if receives else []
        lines += [f"    return({'%v' if receives else ''})", "  }"]
    return Case(name, "\n".join([*lines, "}"]), objects=objects)


def dense(world: int) -> Case:
    """A part of a tensor that does not lie densely in memory arrives dense."""
    return one_way("dense", "f32[4,2]", world, given="f32[4,6]")


_ADD = "  function @builtin.add.f32.8x16(f32[8,16], f32[8,16]) -> (f32[8,16]) {kind = builtin}\n"
_T = "f32[8,16]"


def pipeline(name: str, ranks: int, count: int) -> Case:
    """Each rank doubles what it gets and sends it on, several values one after the other."""
    lines = [f"module @m phase=scheduled world={ranks} {{", _ADD.rstrip()]
    lines += [f"  channel {i} {{ranks = {{{i}..{i + 1}}}}}" for i in range(ranks - 1)]
    for rank in range(ranks):
        params = ", ".join(f"%x{i}: {_T}" for i in range(count)) if rank == 0 else ""
        lines.append(f"  program @{rank}({params}) {{")
        for i in range(count):
            if rank:
                lines.append(
                    f"    %r{i} = recv() {{chan = {rank - 1}, peer = {rank - 1}, seq = {i}}}"
                    f" : future<{_T}>"
                )
                lines.append(f"    %x{i} = wait(%r{i}) : {_T}")
            lines.append(f"    %y{i} = call(%x{i}, %x{i}) {{fn = @builtin.add.f32.8x16}} : {_T}")
            if rank < ranks - 1:
                lines.append(
                    f"    %s{i} = send(%y{i}) {{chan = {rank}, peer = {rank + 1}, seq = {i}}}"
                    " : future<unit>"
                )
                lines.append(f"    wait(%s{i})")
        outputs = ", ".join(f"%y{i}" for i in range(count)) if rank == ranks - 1 else ""
        lines += [f"    return({outputs})", "  }"]
    return Case(name, "\n".join([*lines, "}"]))


def exchange(world: int) -> Case:
    """Each two ranks send to each other at once, and back again."""
    lines = [f"module @m phase=scheduled world={world} {{", _ADD.rstrip()]
    lines += [f"  channel {rank} {{ranks = {{{rank},{rank ^ 1}}}}}" for rank in range(world)]
    for rank in range(world):
        out = rank
        into = peer = rank ^ 1
        lines += [
            f"  program @{rank}(%x: {_T}) {{",
            f"    %r0 = recv() {{chan = {into}, peer = {peer}, seq = 0}} : future<{_T}>",
            f"    %s0 = send(%x) {{chan = {out}, peer = {peer}, seq = 0}} : future<unit>",
            f"    %v0 = wait(%r0) : {_T}",
            f"    %y = call(%v0, %x) {{fn = @builtin.add.f32.8x16}} : {_T}",
            "    wait(%s0)",
            f"    %r1 = recv() {{chan = {into}, peer = {peer}, seq = 1}} : future<{_T}>",
            f"    %s1 = send(%y) {{chan = {out}, peer = {peer}, seq = 1}} : future<unit>",
            f"    %v1 = wait(%r1) : {_T}",
            f"    %z = call(%v1, %v0) {{fn = @builtin.add.f32.8x16}} : {_T}",
            "    wait(%s1)",
            "    return(%z)",
            "  }",
        ]
    return Case("exchange", "\n".join([*lines, "}"]))


def ring(ranks: int) -> Case:
    """Each rank sends to the next and gets from the one before; a received value is sent on."""
    lines = [f"module @m phase=scheduled world={ranks} {{"]
    lines += [
        f"  channel {rank} {{ranks = {{{rank},{(rank + 1) % ranks}}}}}" for rank in range(ranks)
    ]
    for rank in range(ranks):
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        lines += [f"  program @{rank}(%v0: {_T}) {{"]
        for hop in range(ranks):
            lines += [
                f"    %r{hop} = recv() {{chan = {before}, peer = {before}, seq = {hop}}}"
                f" : future<{_T}>",
                f"    %s{hop} = send(%v{hop}) {{chan = {rank}, peer = {after}, seq = {hop}}}"
                " : future<unit>",
                f"    %v{hop + 1} = wait(%r{hop}) : {_T}",
                f"    wait(%s{hop})",
            ]
        lines += [f"    return(%v{ranks}, %v1)", "  }"]
    return Case("ring", "\n".join([*lines, "}"]))


def columns(world: int) -> Case:
    """Each two ranks have rows, and put uneven columns of both together; a packed part as well."""
    lines = [f"module @m phase=scheduled world={world} {{"]
    lines += [f"  channel {rank} {{ranks = {{{rank},{rank ^ 1}}}}}" for rank in range(world)]
    for rank in range(world):
        peer = rank ^ 1
        widths, parts = (2, 3), ("0:2", "2:5")
        mine, theirs = rank % 2, peer % 2
        width, top = widths[mine], "0:3" if not mine else "3:6"
        rest = "3:6" if not mine else "0:3"
        lines += [
            f"  program @{rank}(%x: f32[3,5]) {{",
            f"    %r = recv() {{chan = {peer}, peer = {peer}, seq = 0}} : future<f32[3,{width}]>",
            f"    %p = slice(%x) {{region = [0:3,{parts[theirs]}]}} : f32[3,{widths[theirs]}]",
            f"    %s = send(%p) {{chan = {rank}, peer = {peer}, seq = 0}} : future<unit>",
            f"    %own = slice(%x) {{region = [0:3,{parts[mine]}]}} : f32[3,{width}]",
            f"    %v = wait(%r) : f32[3,{width}]",
            f"    %y = assemble(%own, %v) {{regions = {{[{top},0:{width}], [{rest},0:{width}]}}}}"
            f" : f32[6,{width}]",
            "    wait(%s)",
            f"    %q = slice(%y) {{region = [0:2+3:5,0:{width}]}} : f32[4,{width}]",
            f"    %r1 = recv() {{chan = {peer}, peer = {peer}, seq = 1}}"
            f" : future<f32[4,{widths[theirs]}]>",
            f"    %s1 = send(%q) {{chan = {rank}, peer = {peer}, seq = 1}} : future<unit>",
            f"    %v1 = wait(%r1) : f32[4,{widths[theirs]}]",
            "    wait(%s1)",
            "    return(%y, %v1)",
            "  }",
        ]
    return Case("columns", "\n".join([*lines, "}"]))


def layouts(world: int) -> Iterator[Case]:
    """Transfers between layouts: messages and collectives between parts of tensors."""
    for name, text, reduces in programs(world):
        yield Case(name, text, reduces=DType.F32 if reduces else None)


_REDUCED = (DType.F64, DType.F32, DType.F16, DType.BF16, DType.I64, DType.I32, DType.I8, DType.U8)


def collectives(world: int) -> Iterator[Case]:
    """Each collective, over types, dimensions and groups."""
    collective = partial(_collective, world=world)
    for dtype in (*_REDUCED, DType.BOOL):
        for op in ("sum", "prod", "min", "max"):
            yield collective(
                f"all_reduce-{op}-{dtype.value}", f"all_reduce(%x) {{@, op = {op}}}", dtype, (4, 6)
            )
    for dtype in (DType.F32, DType.F64, DType.I32):
        yield collective(
            f"all_reduce-avg-{dtype.value}", "all_reduce(%x) {@, op = avg}", dtype, (4, 6)
        )
    yield collective("all_reduce-large", "all_reduce(%x) {@, op = sum}", DType.F32, (400, 500))
    yield collective("all_reduce-scalar", "all_reduce(%x) {@, op = sum}", DType.F32, ())
    yield collective("all_reduce-empty", "all_reduce(%x) {@, op = sum}", DType.F32, (0, 2))
    for dim in (0, 1):
        yield collective(
            f"all_gather-{dim}", f"all_gather(%x) {{dim = {dim}, @}}", DType.F32, (4, 6), grow=dim
        )
        yield collective(
            f"all_to_all-{dim}", f"all_to_all(%x) {{dim = {dim}, @}}", DType.I16, (4, 8)
        )
        for dtype in (DType.F32, DType.I64):
            yield collective(
                f"reduce_scatter-{dim}-{dtype.value}",
                f"reduce_scatter(%x) {{dim = {dim}, @, op = sum}}",
                dtype,
                (4, 8),
                shrink=dim,
            )
    some = (world - 2 or 1, 0)
    yield collective(
        "all_reduce-group", "all_reduce(%x) {@, op = sum}", DType.F32, (3,), group=some
    )
    yield collective("all_gather-f16", "all_gather(%x) {dim = 1, @}", DType.F16, (3, 2), grow=1)
    yield from (broadcast(root, world) for root in range(world))
    for dim, root in enumerate((world - 1, 0)):
        yield gather(root, world, dim)
        yield scatter(root, world, dim)
    yield barrier(world)


def _collective(
    name: str,
    call: str,
    dtype: DType,
    shape: tuple[int, ...],
    grow: int | None = None,
    shrink: int | None = None,
    group: tuple[int, ...] = (),
    *,
    world: int,
) -> Case:
    """Two collectives of a group, one after the other."""
    members = group or tuple(range(world))
    result = list(shape)
    if grow is not None:
        result[grow] *= len(members)
    if shrink is not None:
        result[shrink] //= len(members)
    ranks = "{" + ",".join(map(str, members)) + "}"
    operand_type, result_type = str(TensorType(dtype, shape)), str(TensorType(dtype, tuple(result)))
    lines = [
        f"module @m phase=scheduled world={world} {{",
        f"  channel 0 {{collective = true, ranks = {ranks}}}",
    ]
    for rank in range(world):
        if rank not in members:
            lines += [f"  program @{rank}() {{", "    return()", "  }"]
            continue
        lines.append(f"  program @{rank}(%x: {operand_type}) {{")
        for seq in range(2):
            where = f"chan = 0, group = {ranks}, seq = {seq}"
            lines.append(f"    %f{seq} = {call.replace('@', where)} : future<{result_type}>")
        lines += [f"    %y{seq} = wait(%f{seq}) : {result_type}" for seq in range(2)]
        lines += ["    return(%y0, %y1)", "  }"]
    reduces = dtype if "reduce" in call else None
    return Case(name, "\n".join([*lines, "}"]), reduces=reduces)


def broadcast(root: int, world: int) -> Case:
    """One rank's value, on all."""
    types = ["bf16[7]"] * world
    return _rooted(f"broadcast-{root}", f"root = {root}", [root], "bf16[7]", types)


def gather(root: int, world: int, dim: int) -> Case:
    """All ranks' tensors, on one."""
    whole = f"f32[{3 * world},2]" if dim == 0 else f"f32[3,{2 * world}]"
    types = [whole if rank == root else "unit" for rank in range(world)]
    name, attributes = f"gather-{dim}-{root}", f"dim = {dim}, root = {root}"
    return _rooted(name, attributes, list(range(world)), "f32[3,2]", types)


def scatter(root: int, world: int, dim: int) -> Case:
    """For each rank its part of one rank's tensor."""
    whole = f"i64[{3 * world},2]" if dim == 0 else f"i64[3,{2 * world}]"
    name, attributes = f"scatter-{dim}-{root}", f"dim = {dim}, root = {root}"
    return _rooted(name, attributes, [root], whole, ["i64[3,2]"] * world)


def _rooted(
    name: str, attributes: str, senders: list[int], operand: str, results: list[str]
) -> Case:
    """Two collectives with a root, one after the other."""
    world, op = len(results), name.partition("-")[0]
    group = f"{{0..{world - 1}}}"
    lines = [
        f"module @m phase=scheduled world={world} {{",
        f"  channel 0 {{collective = true, ranks = {group}}}",
    ]
    for rank, result in enumerate(results):
        gives = rank in senders
        lines.append(f"  program @{rank}({f'%x: {operand}' if gives else ''}) {{")
        for seq in range(2):
            lines += [
                f"    %f{seq} = {op}({'%x' if gives else ''}) {{chan = 0, group = {group}, "
                f"{attributes}, seq = {seq}}} : future<{result}>",
                f"    %y{seq} = wait(%f{seq}) : {result}",
            ]
        lines += ["    return()" if result == "unit" else "    return(%y0, %y1)", "  }"]
    return Case(name, "\n".join([*lines, "}"]))


def barrier(world: int) -> Case:
    """No values, but a meeting."""
    group = f"{{0..{world - 1}}}"
    lines = [
        f"module @m phase=scheduled world={world} {{",
        f"  channel 0 {{collective = true, ranks = {group}}}",
    ]
    for rank in range(world):
        lines += [
            f"  program @{rank}(%x: f32[2]) {{",
            f"    %f = barrier() {{chan = 0, group = {group}, seq = 0}} : future<unit>",
            "    wait(%f)",
            "    return(%x)",
            "  }",
        ]
    return Case("barrier", "\n".join([*lines, "}"]))
