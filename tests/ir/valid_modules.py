"""A valid module for each phase, and what the verifier says of one that is broken."""

from __future__ import annotations

import pytest

from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify

DECLARATIONS = """
  function @f(f32[4]) -> (f32[4]) {actor = a0, effect = read}
  function @f.fwd(f32[4]) -> (f32[4], f32[2], i64[]) {actor = a0, effect = read}
  function @f.bwd(f32[2], i64[], f32[4]) -> (f32[4]) {actor = a0, effect = accumulate}
  function @g(f32[4], object) -> (f32[], unit) {actor = a1, aliases = {0 -> 0}, effect = write}
  function @drop(f32[4]) -> (f32[4]) {random = true}
  function @update() -> (unit) {actor = a0, effect = write}
  vjp @v {backward = @f.bwd, forward = @f.fwd, grad_inputs = {0}, grad_outputs = {0}}
"""

TRACED = f"""module @m phase=traced world=2 {{{DECLARATIONS}
  program @m(%x: f32[4]@{{0..1}}, %o: object@1) {{
    %h = call(%x) {{fn = @f, vjp = @v}} : f32[4]@0
    %h2 = call(%h) {{fn = @f, vjp = @v}} : f32[4]@0
    %d = call(%x) {{fn = @drop, key = 0}} : f32[4]@1
    %l, %u = call(%h2, %o) {{fn = @g}} : f32[]@1, unit@1
    %p = view(%x) {{dim = 0, length = 2, start = 2}} : f32[2]@0
    %q = copy(%p) : f32[2]@0
    %c = constant() {{fill = 1.0}} : f32[]@{{0..1}}
    %r = constant() {{ref = @c0}} : object@0
    %s = all_reduce(%h, %d) {{group = {{0..1}}, op = sum}} : f32[4]@{{0..1}}
    %t = all_gather(%h, %d) {{dim = 0, group = {{0..1}}}} : f32[8]@{{0..1}}
    %e0, %e1 = reduce_scatter(%h, %d) {{dim = 0, group = {{0..1}}, op = avg}} : f32[2]@0, f32[2]@1
    %a0, %a1 = all_to_all(%h, %d) {{dim = 0, group = {{0..1}}}} : f32[4]@0, f32[4]@1
    %b = broadcast(%h) {{group = {{0..1}}, root = 0}} : f32[4]@{{0..1}}
    %y0, %y1 = gather(%h, %d) {{dim = 0, group = {{0..1}}, root = 1}} : unit@0, f32[8]@1
    %z0, %z1 = scatter(%h) {{dim = 0, group = {{0..1}}, root = 0}} : f32[2]@0, f32[2]@1
    %n = barrier() {{group = {{0..1}}}} : unit@{{0..1}}
    backward(%l)
    %k = call() {{fn = @update}} : unit@0
    return(%l, %h) {{at = {{0..1}}}}
  }}
}}
"""

PLACED = f"""module @m phase=placed world=2 {{{DECLARATIONS}
  program @m(%x: f32[4]@{{0..1}}, %o: object@1) {{
    %h = call(%x) {{fn = @f}} : f32[4]@0
    %t = transfer(%h) {{via = nccl}} : f32[4]@1
    %l, %u = call(%t, %o) {{fn = @g}} : f32[]@1, unit@1
    %b = broadcast(%h) {{group = {{0..1}}, root = 0}} : f32[4]@{{0..1}}
    %r = all_reduce(%h, %t) {{group = {{0..1}}, op = max}} : f32[4]@{{0..1}}
    %l0 = transfer(%l) : f32[]@{{0..1}}
    return(%l0) {{at = {{0..1}}}}
  }}
}}
"""

ASYNC = f"""module @m phase=async world=2 {{{DECLARATIONS}
  channel 0 {{ranks = {{0,1}}}}
  channel 1 {{collective = true, ranks = {{0..1}}}}
  program @m(%x: f32[4]@{{0..1}}, %o: object@1) {{
    %h = call(%x) {{fn = @f}} : f32[4]@0
    %s = send(%h) {{chan = 0, peer = 1, seq = 0}} : future<unit@0>
    %r = recv() {{chan = 0, peer = 0, seq = 0}} : future<f32[4]@1>
    wait(%s)
    %t = wait(%r) : f32[4]@1
    %l, %u = call(%t, %o) {{fn = @g}} : f32[]@1, unit@1
    %b = broadcast(%l) {{chan = 1, group = {{0..1}}, root = 1, seq = 0}} : future<f32[]@{{0..1}}>
    %l0 = wait(%b) : f32[]@{{0..1}}
    return(%l0) {{at = {{0..1}}}}
  }}
}}
"""

SCHEDULED = f"""module @m phase=scheduled world=2 {{{DECLARATIONS}
  channel 0 {{ranks = {{0,1}}}}
  channel 1 {{collective = true, ranks = {{0..1}}}}
  program @0(%x: f32[4]) {{
    %h = call(%x) {{fn = @f, stream = compute}} : f32[4]
    %w = wait(%h) {{stream = send}} : f32[4]
    %s = send(%w) {{chan = 0, peer = 1, seq = 0, stream = send}} : future<unit>
    %s1 = send(%w) {{chan = 0, peer = 1, seq = 1, stream = send}} : future<unit>
    %u = wait(%s) {{stream = compute}} : unit
    %b = broadcast() {{chan = 1, group = {{0..1}}, root = 1, seq = 0, stream = collective}}
      : future<f32[]>
    %l0 = wait(%b) {{stream = compute}} : f32[]
    %n = barrier() {{chan = 1, group = {{0..1}}, seq = 1, stream = collective}} : future<unit>
    %xo = wait(%x) {{stream = offload}} : f32[4]
    %xh = copy_start(%xo) {{slot = 0, stream = offload}} : future<f32[4]:host>
    %xw = wait(%xh) {{stream = fetch}} : f32[4]:host
    %xb = copy_start(%xw) {{stream = fetch}} : future<f32[4]>
    return(%l0)
  }}
  program @1(%x: f32[4], %o: object) {{
    %a = alloc() {{offset = 0}} : f32[4]
    %r = recv(%a) {{chan = 0, peer = 0, seq = 0, stream = recv}} : future<f32[4]>
    %r1 = recv() {{chan = 0, peer = 0, seq = 1, stream = recv}} : future<f32[4]>
    %t = wait(%r) {{stream = compute}} : f32[4]
    %l, %u = call(%t, %o) {{fn = @g, stream = compute}} : f32[], unit
    free(%a, %u)
    %c, %c0, %c1 = reserve() {{regions = {{[0:4], [4:8]}}, stream = compute}}
      : f32[8], f32[4], f32[4]
    %d0 = copy(%t, %c0) {{stream = compute}} : f32[4]
    %d1 = copy(%x, %c1) {{stream = compute}} : f32[4]
    %d = assemble(%c, %d0, %d1) {{regions = {{[0:4], [4:8]}}, stream = compute}} : f32[8]
    %lc = wait(%l) {{stream = collective}} : f32[]
    %b = broadcast(%lc) {{chan = 1, group = {{0..1}}, root = 1, seq = 0, stream = collective}}
      : future<f32[]>
    %l0 = wait(%b) {{stream = compute}} : f32[]
    %n = barrier() {{chan = 1, group = {{0..1}}, seq = 1, stream = collective}} : future<unit>
    %xo = wait(%x) {{stream = offload}} : f32[4]
    %xh = copy_start(%xo) {{slot = 0, stream = offload}} : future<f32[4]:host>
    %xw = wait(%xh) {{stream = fetch}} : f32[4]:host
    %xb = copy_start(%xw) {{stream = fetch}} : future<f32[4]>
    return(%l0)
  }}
}}
"""

# Rank r of 0..2 holds rows [0, 2), [2, 5) or [5, 8) of %x, and two of the blocks of %q.
LAID_OUT = """module @m phase=placed world=4 {
  mesh @a {dp = 3, ranks = {0..2}}
  program @m(%x: f32[8/dp,4]@a, %q: f32[2*6/dp]@a, %z: f32[]@{0..3}) {
    %x0 = slice(%x) {region = [0:2,0:4]} : f32[2,4]@0
    %x1 = slice(%x) {region = [2:4,0:4]} : f32[2,4]@1
    %x2 = slice(%x) {region = [4:5,0:4]} : f32[1,4]@1
    %x3 = slice(%x) {region = [5:8,0:4]} : f32[3,4]@2
    %p0 = transfer(%x0) : f32[2,4]@3
    %p2 = transfer(%x2) : f32[1,4]@0
    %p3 = transfer(%x3) : f32[3,4]@{1..2}
    %y = assemble(%p0) {regions = {[0:2,0:4]}} : f32[2,4]@3
    %y0 = transfer(%x0) : f32[2,4]@{0..1}
    %y1 = transfer(%x1) : f32[2,4]@{0..1}
    %y2 = transfer(%x2) : f32[1,4]@{0..1}
    %y3 = transfer(%x3) : f32[3,4]@{0..1}
    %w = assemble(%y0, %y3, %y1, %y2)
      {regions = {[0:2,0:4], [5:8,0:4], [2:4,0:4], [4:5,0:4]}} : f32[8,4]@{0..1}
    %q1 = slice(%q) {region = [2:4+8:10]} : f32[4]@1
    %e = slice(%x) {region = [0:0,0:4]} : f32[0,4]@1
    %z3 = slice(%z) {region = []} : f32[]@3
    %none = assemble() {regions = {}} : f32[0/*,4]@{0..1}
    return() {at = {0..3}}
  }
}
"""

ROWS = """module @m phase=placed world=4 {
  mesh @m {dp = 2, ep = 2, ranks = {0..3}}
  program @m(%x: f32[8/dp.ep,4]@m, %i: i64[8/dp,2]@m, %h: f32[8/dp,2,4|+ep]@m) {
    %y = transfer(%x, %i) {experts = {[0:3], [3:8], [0:3], [3:8]}, lead = 1} : f32[8/dp,4]@m
    %z = transfer(%h, %i) {experts = {[0:3], [3:8], [0:3], [3:8]}, lead = 2} : f32[8/dp.ep,2,4]@m
    %x0 = slice(%x) {region = [0:2,0:4]} : f32[2,4]@0
    %x1 = slice(%x) {region = [2:4,0:4]} : f32[2,4]@1
    %i0 = slice(%i) {region = [0:4,0:2]} : i64[4,2]@0
    %i1 = slice(%i) {region = [0:4,0:2]} : i64[4,2]@1
    %y0, %y1 = all_gather_rows(%x0, %x1, %i0, %i1)
      {experts = {[0:3+5:6], [0:0]}, group = {0..1}, lead = 1} : f32[4,4]@0, f32[4,4]@1
    %h0 = slice(%h) {region = [0:4,0:2,0:4]} : f32[4,2,4]@0
    %h1 = slice(%h) {region = [0:4,0:2,0:4]} : f32[4,2,4]@1
    %z0, %z1 = reduce_scatter_rows(%h0, %h1, %i0, %i1)
      {experts = {[0:3], [3:8]}, group = {0..1}, lead = 2} : f32[2,2,4]@0, f32[2,2,4]@1
    return() {at = {0..3}}
  }
}
"""

VALID = {
    "traced": TRACED,
    "placed": PLACED,
    "async": ASYNC,
    "scheduled": SCHEDULED,
    "laid out": LAID_OUT,
    "rows": ROWS,
}


def errors(module: Module) -> str:
    with pytest.raises(IRError) as caught:
        verify(module)
    return str(caught.value)


def broken(text: str, old: str, new: str) -> str:
    assert old in text, "the module does not have what is to be broken"
    module = parse_module(text.replace(old, new, 1))
    return errors(module)
