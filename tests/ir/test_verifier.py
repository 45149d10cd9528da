"""Every rule of the verifier: a valid module, and the same module with that rule broken."""

from __future__ import annotations

import pytest

from cg.ir.attributes import Symbol
from cg.ir.ops import OP_CLASSES, Broadcast, Call, Return, Value
from cg.ir.ops.collectives import Exchange
from cg.ir.ops.module import Module, Program
from cg.ir.phases import Phase
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.types import DType, Place, TensorType, UnitType
from cg.ir.verify.verifier import verify

from .valid_modules import ASYNC, PLACED, SCHEDULED, TRACED, VALID, broken, errors


@pytest.mark.parametrize("phase", VALID)
def test_valid(phase: str) -> None:
    verify(parse_module(VALID[phase]))


@pytest.mark.parametrize("phase", Phase)
def test_valid_modules_use_all_ops_of_the_phase(phase: Phase) -> None:
    """So that every op is known to be accepted somewhere, and not only to be refused."""
    used = {opcode for text in VALID.values() for opcode in OP_CLASSES if f"{opcode}(" in text}
    assert {cls.opcode for cls in OP_CLASSES.values() if phase in cls.phases} <= used


CALL = "%h = call(%x) {fn = @f, vjp = @v} : f32[4]@0"
GATHER = "gather(%h, %d) {dim = 0, group = {0..1}, root = 1}"
SCATTER = "reduce_scatter(%h, %d) {dim = 0, group = {0..1}, op = avg}"
VIEW = "%p = view(%x) {dim = 0, length = 2, start = 2} : f32[2]@0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # phases
        ("backward(%l)", "%z = transfer(%h) : f32[4]@1", "transfer in phase traced"),
        ("backward(%l)", "free(%h)", "free in phase traced"),
        # uses and the end
        ("backward(%l)\n", "return()\n", "return is not the last op"),
        ("    return(%l, %h) {at = {0..1}}\n", "", "the program does not end in return"),
        # constants
        ("{ref = @c0}", "{fill = 1, ref = @c0}", "constant has both fill and ref"),
        ("{ref = @c0}", "", "constant has neither fill nor ref"),
        ("{ref = @c0}", "{fill = 1}", "constant works on tensors, %r is object"),
        ("constant() {ref", "constant(%x) {ref", "constant takes no operand, here it has 1"),
        ("%r = constant() {ref = @c0} : object@0",
         "%r, %r1 = constant() {ref = @c0} : object@0, object@0",
         "constant makes one result, here it has 2"),
        # calls
        ("fn = @f,", "fn = @ff,", "call of @ff, which the module does not declare"),
        (CALL, CALL.replace("(%x)", "()"), "@f takes 1 inputs, this call has 0"),
        (CALL, CALL.replace("(%x)", "(%x, %x)"), "@f takes 1 inputs, this call has 2"),
        (CALL, CALL.replace("%x", "%o"), "%o is object, but @f takes as input 0 f32[4]"),
        (CALL, CALL.replace("f32[4]@0", "f32[5]@0"), "%h is f32[5], but @f returns as output 0"),
        (CALL, CALL.replace("f32[4]@0", "f16[4]@0"), "%h is f16[4], but @f returns as output 0"),
        ("%l, %u = call(%h2, %o) {fn = @g} : f32[]@1, unit@1",
         "%l = call(%h2, %o) {fn = @g} : f32[]@1", "@g returns 2 outputs, this call has 1"),
        ("fn = @drop, key = 0", "fn = @drop", "@drop draws random numbers, and this call"),
        # views and copies
        (VIEW, VIEW.replace("(%x)", "(%x, %x)"), "view takes one operand, here it has 2"),
        (VIEW, VIEW.replace("%x", "%o"), "view works on tensors, %o is object"),
        (VIEW, VIEW.replace("dim = 0", "dim = 1"), "view of dimension 1 of f32[4], which has 1"),
        (VIEW, VIEW.replace("start = 2", "start = 3"), "view of entries 3..5 of a dimension of 4"),
        (VIEW, VIEW.replace("start = 2", "start = -1"), "view of entries -1..1 of a dimension"),
        (VIEW, VIEW.replace("f32[2]@0", "f32[3]@0"), "%p is f32[3], but this view makes f32[2]"),
        (VIEW, VIEW.replace("%p", "%p, %p0") + ", f32[2]@0", "view makes one result"),
        ("copy(%p) : f32[2]", "copy(%p) : f32[3]", "%q is f32[3], but copy keeps the operand's"),
        ("copy(%p)", "copy(%p, %p)", "copy takes one operand"),
        ("%q = copy(%p) : f32[2]@0", "copy(%p)", "copy makes one result, here it has 0"),
        # backward
        ("backward(%l)", "backward()", "backward takes at least one loss"),
        ("backward(%l)", "backward(%h)", "backward takes real floating scalars, %h is f32[4]"),
        ("backward(%l)", "backward(%r)", "backward works on tensors, %r is object"),
        ("constant() {fill = 1.0} : f32[]@{0..1}\n", "constant() {fill = 1} : i64[]@1\n"
         "    backward(%c)\n", "backward takes real floating scalars, %c is i64[]"),
        ("constant() {fill = 1.0} : f32[]@{0..1}\n", "constant() {fill = 1} : c64[]@1\n"
         "    backward(%c)\n", "backward takes real floating scalars, %c is c64[]"),
        ("backward(%l)", "%z = backward(%l) : unit@0", "backward makes no result"),
        ("return(%l, %h) {at = {0..1}}", "%z = return(%l, %h) {at = {0..1}} : unit@0",
         "return makes no result, here it has 1"),
        # collectives
        ("all_reduce(%h, %d)", "all_reduce(%h)", "all_reduce takes one operand for each rank"),
        ("all_reduce(%h, %d)", "all_reduce(%h, %p)", "%p is f32[2], but the all_reduce has"),
        ("all_reduce(%h, %d)", "all_reduce(%o, %d)", "all_reduce works on tensors, %o is object"),
        ("op = sum} : f32[4]", "op = sum} : f32[8]", "this all_reduce makes f32[4], not f32[8]"),
        ("all_gather(%h, %d) {dim = 0", "all_gather(%h, %d) {dim = 1", "along dimension 1 of f32"),
        ("} : f32[8]@{0..1}", "} : f32[4]@{0..1}", "this all_gather makes f32[8], not f32[4]"),
        (f"%e0, %e1 = {SCATTER} : f32[2]@0, f32[2]@1", f"%e0 = {SCATTER} : f32[2]@0",
         "reduce_scatter makes one result (scattered: one for each rank), here it has 1"),
        ("f32[2]@0, f32[2]@1", "f32[2]@0, f32[4]@1", "this reduce_scatter makes f32[2], not"),
        ("reduce_scatter(%h, %d)", "reduce_scatter(%l, %l)", "along dimension 0 of f32[]"),
        ("f32[4]@0, f32[4]@1", "f32[4]@0, f32[2]@1", "this all_to_all makes f32[4], not f32[2]"),
        ("broadcast(%h)", "broadcast(%h, %h)", "broadcast takes one operand, on the root's"),
        ("root = 0", "root = 2", "broadcast from rank 2, which is not of the group @{0..1}"),
        ("root = 0} : f32[4]", "root = 0} : f32[5]", "this broadcast makes f32[4], not f32[5]"),
        (GATHER, GATHER.replace("%h, %d", "%h"), "gather takes one operand for each rank of the"),
        (GATHER, GATHER.replace("root = 1", "root = 3"), "gather to rank 3, which is not of the"),
        ("unit@0, f32[8]@1", "f32[8]@0, unit@1", "this gather makes unit, not f32[8]"),
        ("unit@0, f32[8]@1", "unit@0, f32[4]@1", "this gather makes f32[8], not f32[4]"),
        ("unit@0, f32[8]@1", "unit@0, f32[8]@0", "%y1 is at @0, this gather makes it at @1"),
        ("= scatter(%h)", "= scatter(%h, %h)", "scatter takes one operand, on the root's rank"),
        ("0} : f32[2]@0", "2} : f32[2]@0", "scatter from rank 2, which is not of the group"),
        ("= scatter(%h)", "= scatter(%l)", "scatter along dimension 0 of f32[]"),
        ("= scatter(%h)", "= scatter(%o)", "scatter works on tensors, %o is object"),
        ("0} : f32[2]@0", "0} : f32[4]@0", "this scatter makes f32[2], not f32[4]"),
        ("barrier()", "barrier(%h)", "barrier takes no operand"),
        ("unit@{0..1}", "object@{0..1}", "this barrier makes unit, not object"),
        ("root = 0}", "root = 0, chan = 0, seq = 0}", "broadcast has a channel, in phase traced"),
        # places
        (VIEW, VIEW.replace("%x", "%h").replace("f32[2]@0", "f32[2]@1"),
         "%h is at @0, but view runs at @1"),
        (VIEW, VIEW.replace("@0", ""), "the type of %p has no place"),
        (VIEW, VIEW.replace("@0", "@2"), "%p is at rank 2, the world has 2"),
        ("%o: object@1", "%o: object@5", "%o is at rank 5, the world has 2"),
        ("at = {0..1}", "at = {0..2}", "return is at rank 2, the world has 2"),
        ("group = {0..1}}", "group = {1..2}}", "all_gather is at rank 2, the world has 2"),
        ("f32[]@1, unit@1", "f32[]@1, unit@0", "%u is at @0, the op runs at @1"),
        ("f32[4]@0, f32[4]@1", "f32[4]@0, f32[4]@0", "%a1 is at @0, this all_to_all makes it"),
        ("op = sum} : f32[4]@{0..1}", "op = sum} : f32[4]@0", "%s is at @0, this all_reduce makes"),
        ("%h2 = call(%h) {fn = @f, vjp = @v} : f32[4]@0", "%h2 = call(%h) {fn = @f} : f32[4]@1",
         "a call on actor a0 at @1, which lives at @0"),
        # declarations
        ("aliases = {0 -> 0}", "aliases = {0 -> 2}", "has the alias 0 -> 2, which is out of range"),
        ("aliases = {0 -> 0}", "aliases = {2 -> 0}", "has the alias 2 -> 0, which is out of range"),
        ("@f(f32[4])", "@f(f32[4]@0)", "function @f has a place in its signature"),
        ("  vjp @v", "  channel 0 {ranks = {0..1}}\n  vjp @v", "channel 0 in phase traced, which"),
        # derivatives
        ("vjp = @v}", "vjp = @w}", "the module does not declare vjp @w"),
        ("backward = @f.bwd", "backward = @b", "vjp @v: the module does not declare its"),
        ("forward = @f.fwd", "forward = @f", "do not split into saved values of @f"),
        ("forward = @f.fwd", "forward = @update", "do not split into saved values of @update"),
        ("grad_outputs = {0}", "grad_outputs = {1}", "are not ascending indices of its 1 outputs"),
        ("grad_outputs = {0}", "grad_outputs = {0,1,2,3}", "do not split into saved values"),
        ("grad_inputs = {0}", "grad_inputs = {1}", "are not ascending indices of its 1 inputs"),
        ("@f.bwd(f32[2], i64[], f32[4])", "@f.bwd(i64[], f32[2], f32[4])",
         "the inputs of @f.bwd are not the saved values, then the cotangents"),
        ("i64[], f32[4]) -> (f32[4])", "i64[], f32[4]) -> (f32[2])",
         "the outputs of @f.bwd are not the cotangents of grad_inputs"),
        ("i64[], f32[4]) -> (f32[4])", "i64[], f32[4]) -> (unit)",
         "the outputs of @f.bwd are not the cotangents of grad_inputs"),
        ("(%x) {fn = @drop, key = 0}", "(%x) {fn = @drop, key = 0, vjp = @w}",
         "the module does not declare vjp @w"),
        (CALL, "%h, %z = call(%x, %o) {fn = @g, vjp = @v} : f32[]@1, unit@1\n"
         "    %hh = call(%x) {fn = @f} : f32[4]@0",
         "the forward of vjp @v, @f.fwd, does not fit @g"),
        # the number of programs
        ("  program @m(", "  program @m2() {\n    return()\n  }\n  program @m(",
         "a module in phase traced has one program over all ranks, this one has 2"),
    ],
)  # fmt: skip
def test_traced(old: str, new: str, message: str) -> None:
    assert message in broken(TRACED, old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    return", "    backward(%l)\n    return", "backward in phase placed"),
        ("    return", "    wait(%l)\n    return", "wait in phase placed"),
        ("transfer(%h) {via = nccl} : f32[4]", "transfer(%h) : f32[5]",
         "%t is f32[5], but transfer keeps the operand's type, f32[4]"),
        ("transfer(%h)", "transfer(%h, %h)", "transfer takes one operand"),
        ("call(%t, %o)", "call(%h, %o)", "%h is at @0, but call runs at @1"),
        ("return(%l0)", "return(%l)", "%l is at @1, but return runs at @{0..1}"),
        ("all_reduce(%h, %t)", "all_reduce(%t, %h)", "%t is at @1, but all_reduce runs at @0"),
        ("broadcast(%h)", "broadcast(%t)", "%t is at @1, but broadcast runs at @0"),
    ],
)  # fmt: skip
def test_placed(old: str, new: str, message: str) -> None:
    assert message in broken(PLACED, old, new)


SEND = "%s = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit@0>"
RECV = "%r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]@1>"
BROADCAST = (
    "%b = broadcast(%l) {chan = 1, group = {0..1}, root = 1, seq = 0} : future<f32[]@{0..1}>"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SEND, "%s = transfer(%h) : f32[4]@1", "transfer in phase async"),
        # futures
        ("call(%t, %o)", "call(%r, %o)", "call takes %r, which is only promised yet"),
        ("return(%l0)", "return(%b)", "return takes %b, which is only promised yet"),
        ("%o: object@1", "%o: future<object@1>", "parameter %o is a future"),
        (SEND, SEND.replace("future<unit@0>", "unit@0"), "%s is unit, but send makes future<unit>"),
        (SEND, SEND.replace("(%h)", "()"), "send takes one operand, here it has 0"),
        (f"{SEND}\n", f"{SEND[5:].split(' :')[0]}\n    %s = copy(%h) : f32[4]@0\n",
         "send makes one result"),
        (RECV, RECV.replace("future<f32[4]@1>", "f32[4]@1"), "recv makes a future, %r is f32[4]"),
        (RECV, RECV.replace("()", "(%x)").replace("f32[4]", "f32[5]"),
         "%x is f32[4], but a receive into it promises f32[5]"),
        (RECV, RECV.replace("()", "(%x, %x)"), "recv takes one buffer or none, here it has 2"),
        (RECV, "recv() {chan = 0, peer = 0, seq = 0}\n    %r = copy(%x) : f32[4]@1",
         "recv makes one result, a future"),
        (BROADCAST, BROADCAST.replace("future<f32[]@{0..1}>", "f32[]@{0..1}"),
         "broadcast makes a future, %b is f32[]"),
        # waits
        ("%t = wait(%r) : f32[4]@1", "%t = wait(%r) : f32[5]@1",
         "%t is f32[5], but the wait gives f32[4]"),
        ("%t = wait(%r) : f32[4]@1", "wait(%r)\n    %t = copy(%x) : f32[4]@1",
         "wait makes one result, here it has 0"),
        ("wait(%s)", "wait(%s, %h)", "wait takes one operand, here it has 2"),
        ("wait(%s)", "%w = wait(%s) : object@0", "%w is object, but the wait gives unit"),
        ("wait(%r) : f32[4]@1", "wait(%r) : f32[4]@0", "%r is at @1, but wait runs at @0"),
        # channels
        ("ranks = {0,1}}\n", "ranks = {0,1,1}}\n", "channel 0 is an edge: it has two ranks, not 3"),
        ("ranks = {0,1}}\n", "ranks = {1,1}}\n", "channel 0 names a rank twice"),
        ("ranks = {0,1}}\n", "ranks = {0,2}}\n", "channel 0 has ranks (0, 2), the world has 2"),
        ("{0,1}}\n", "{0,1}, slots = -1}\n", "channel 0 has slots = -1, which is less than 0"),
        ("{0,1}}\n", "{0,1}, slot_bytes = -1}\n", "channel 0 has slot_bytes = -1, which is less"),
        (SEND, SEND.replace("chan = 0", "chan = 7"), "send on channel 7, which the module does"),
        (SEND, SEND.replace("chan = 0", "chan = 1"), "send on channel 1, which is a group's"),
        (SEND, SEND.replace("peer = 1", "peer = 0"), "send with peer 0 on channel 0, which goes"),
        (SEND, SEND.replace("unit@0", "unit@1").replace("(%h)", "(%x)"),
         "send at (1,) on channel 0, whose sends are on rank 0"),
        (RECV, RECV.replace("peer = 0", "peer = 1"), "recv with peer 1 on channel 0, which goes"),
        (RECV, RECV.replace("[4]@1", "[4]@0"), "recv at (0,) on channel 0, whose recvs are"),
        (BROADCAST, BROADCAST.replace("chan = 1", "chan = 0"), "on channel 0, which is an edge's"),
        (BROADCAST, BROADCAST.replace("chan = 1, ", ""), "broadcast has no chan or no seq, in"),
        (BROADCAST, BROADCAST.replace(", seq = 0", ""), "broadcast has no chan or no seq, in"),
        (BROADCAST, BROADCAST.replace("{0..1}", "{1,0}"),
         "the group is @{1,0}, channel 1 serves (0, 1)"),
        # messages
        (f"    {SEND}\n    {RECV}\n    wait(%s)\n", f"    {RECV}\n",
         "recv 0 of channel 0 has no send"),
        (SEND, SEND.replace("seq = 0", "seq = 1"), "send has seq 1, the next of channel 0 is 0"),
        (BROADCAST, BROADCAST.replace("seq = 0", "seq = 1"),
         "broadcast has seq 1, the next of channel 1 is 0"),
        (RECV, f"{RECV}\n    {RECV.replace('%r', '%r1').replace('seq = 0', 'seq = 1')}",
         "recv 1 of channel 0 has no send"),
        (SEND, f"{SEND}\n    {SEND.replace('%s', '%s1').replace('seq = 0', 'seq = 1')}",
         "send 1 of channel 0 has no recv"),
        (f"    {RECV}\n    wait(%s)\n    %t = wait(%r) : f32[4]@1\n",
         f"    {RECV.replace('f32[4]', 'i32[4]')}\n    wait(%s)\n    %t0 = wait(%r) : i32[4]@1\n"
         "    %t = copy(%x) : f32[4]@1\n",
         "recv 0 of channel 0 is i32[4], but what is sent is f32[4]"),
        (f"    {SEND}\n    {RECV}\n", f"    {RECV}\n    {SEND}\n",
         "recv 0 of channel 0 stands above its send"),
    ],
)  # fmt: skip
def test_async(old: str, new: str, message: str) -> None:
    assert message in broken(ASYNC, old, new)


def test_async_messages_may_stand_in_any_order() -> None:
    """Before SCHEDULED the one program is not yet the order in which the ranks issue.

    But what is received has been sent above.
    """
    second = [
        op.replace("%s", "%s1").replace("%r", "%r1").replace("seq = 0", "seq = 1")
        for op in (SEND, RECV)
    ]
    first_last = f"{second[0]}\n    {SEND}\n    {second[1]}\n    {RECV}\n"
    verify(parse_module(ASYNC.replace(f"{SEND}\n    {RECV}\n", first_last)))


SEND1 = "%s1 = send(%w) {chan = 0, peer = 1, seq = 1, stream = send} : future<unit>"
RECV1 = "%r1 = recv() {chan = 0, peer = 0, seq = 1, stream = recv} : future<f32[4]>"
BARRIER = "%n = barrier() {chan = 1, group = {0..1}, seq = 1, stream = collective} : future<unit>"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # programs
        ("program @1(", "program @0(", "one program for each of its 2 ranks, this one has none"),
        ("world=2", "world=3", "one program for each of its 3 ranks, this one has none for [2]"),
        ("world=2", "world=1", "one program for each of its 1 ranks, this one has 2"),
        # places
        ("%x: f32[4])", "%x: f32[4]@0)", "the type of %x has a place, in a scheduled program"),
        ("return(%l0)", "return(%l0) {at = {0}}", "a rank's program returns to its own rank"),
        # streams
        ("send(%w)", "send(%h)", "%h is made on stream compute, but send runs on stream send"),
        ("wait(%r) {stream = compute}", "wait(%r) {stream = copy}",
         "%t is made on stream copy, but call runs on stream compute"),
        # storage
        ("alloc() {offset = 0}", "alloc() {offset = -8}", "alloc at the negative offset -8"),
        ("alloc()", "alloc(%x)", "alloc takes no operand"),
        ("%a = alloc() {offset = 0} : f32[4]", "%a = alloc() {offset = 0} : object",
         "alloc works on tensors, %a is object"),
        ("%a = alloc() {offset = 0} : f32[4]", "%a, %b0 = alloc() {offset = 0} : f32[4], f32[4]",
         "alloc makes one result, here it has 2"),
        ("free(%a, %u)", "free()", "free takes the storage to give back"),
        ("free(%a, %u)", "free(%u)", "free of a unit, which has no storage"),
        ("free(%a, %u)", "%z = free(%a) : unit", "free makes no result"),
        ("free(%a, %u)", "free(%a, %r1)", "free takes %r1, which is only promised yet"),
        ("free(%a, %u)", "free(%a)\n    %z = copy(%a) : f32[4]", "%a is used after it was freed"),
        # collectives
        ("broadcast()", "broadcast(%h)", "broadcast takes one operand, on the root's rank alone"),
        ("broadcast(%lc)", "broadcast()", "broadcast takes one operand, on the root's rank alone"),
        # channels and messages
        (SEND1, SEND1.replace("peer = 1", "peer = 0"), "send with peer 0 on channel 0"),
        (RECV1, SEND1.replace("%w", "%x").replace("%s1", "%r1"),
         "send at (1,) on channel 0, whose sends are on rank 0"),
        (f"    {SEND1}\n", "", "recv 1 of channel 0 has no send"),
        (f"    {RECV1}\n", "", "send 1 of channel 0 has no recv"),
        ("seq = 0, stream = send", "seq = 2, stream = send", "send has seq 2, the next of channel"),
        (RECV1, RECV1.replace("f32[4]", "f32[5]"),
         "recv 1 of channel 0 is f32[5], but what is sent is f32[4]"),
        (RECV1, RECV1.replace("peer", "mb = 3, peer"),
         "recv 1 of channel 0 is of microbatch 3, but what is sent is of no microbatch"),
        (BARRIER, BARRIER.replace("seq", "mb = 3, seq"),
         "the ranks of channel 1 do not agree on collective 1"),
        (f"    {BARRIER}\n", "", "rank 0 does not take part in barrier 1 of channel 1"),
        (BARRIER, BARRIER.replace("barrier()", "all_reduce(%x)")
         .replace("{0..1}", "{0..1}, op = sum").replace("<unit>", "<f32[4]>"),
         "the ranks of channel 1 do not agree on collective 1"),
        (BARRIER, BARRIER.replace("chan = 1", "chan = 0"), "which is an edge's"),
    ],
)  # fmt: skip
def test_scheduled(old: str, new: str, message: str) -> None:
    assert message in broken(SCHEDULED, old, new)


def test_the_first_rank_of_a_group_is_missed_too() -> None:
    module = parse_module(SCHEDULED)
    ops = module.program_of(0).ops
    module.program_of(0).ops = [op for op in ops if op.opcode != "barrier"]
    assert "rank 0 does not take part in barrier 1 of channel 1" in errors(module)
    module = parse_module(SCHEDULED)
    ops = module.program_of(1).ops
    module.program_of(1).ops = [op for op in ops if op.opcode != "barrier"]
    assert "rank 1 does not take part in barrier 1 of channel 1" in errors(module)


def test_a_rank_outside_the_group_takes_no_part() -> None:
    stranger = f"  program @2() {{\n    {BARRIER}\n    return()\n  }}\n}}\n"
    text = SCHEDULED.replace("world=2", "world=3").removesuffix("}\n") + stranger
    assert "rank 2 takes part in barrier of the group @{0..1}" in errors(parse_module(text))


def test_an_actor_of_scheduled_programs_lives_on_one_rank() -> None:
    call = "    %k = call() {fn = @update} : unit\n    return(%l0)\n"
    text = call.join(SCHEDULED.rsplit("    return(%l0)\n", 1))
    message = errors(parse_module(text))
    assert "a call on actor a0 at @1, which lives at @0" in message
    assert "note: an earlier call is here" in message


def test_a_backward_without_gradients_may_return_unit() -> None:
    text = TRACED.replace("grad_inputs = {0}", "grad_inputs = {}")
    for outputs in ("()", "(unit)"):
        verify(
            parse_module(text.replace("i64[], f32[4]) -> (f32[4])", f"i64[], f32[4]) -> {outputs}"))
        )
    assert "are not the cotangents of grad_inputs" in errors(parse_module(text))


T = TensorType(DType.F32, (2,), Place.of(0))


def module_of(params: list[Value], ops: list[Call | Return]) -> Module:
    module = parse_module(
        "module @m phase=traced world=1 {\n"
        "  function @f(f32[2]) -> (f32[2])\n"
        "  function @nothing() -> ()\n"
        "  vjp @v {backward = @f, forward = @f, grad_inputs = {0}, grad_outputs = {0}}\n"
        "}"
    )
    module.programs = [Program("m", params, [*ops])]
    return module


def call(operand: Value, result: Value) -> Call:
    return Call((operand,), (result,), fn=Symbol("f"))


def test_values_are_defined_once_and_before_use() -> None:
    x, y, z = Value("x", T), Value("y", T), Value("z", T)
    verify(module_of([x], [call(x, y), call(y, z), Return((z,))]))
    late = module_of([x], [call(y, z), call(x, y), Return((z,))])
    assert "%y is used before it is defined" in errors(late)
    twice = module_of([x], [call(x, Value("x", T)), Return((x,))])
    assert "%x is defined twice" in errors(twice)
    params = module_of([x, Value("x", T)], [Return((x,))])
    assert "%x is defined twice" in errors(params)
    namesake = module_of([x], [Return((Value("x", T),))])
    assert "%x is used before it is defined" in errors(namesake)


def test_a_program_without_ops() -> None:
    assert "the program does not end in return" in errors(module_of([], []))


def test_a_call_is_somewhere() -> None:
    message = errors(module_of([], [Call(fn=Symbol("nothing")), Return()]))
    assert "a call with neither operands nor results is at no place" in message
    assert "help: let the function return unit, and give its result a place" in message


@pytest.mark.parametrize(
    ("ranks", "receivers", "concat", "message", "remedy"),
    [
        ((0, 1), (1,), None, None, ""),
        (
            (0, 1, 2),
            (1,),
            None,
            "ranks [2] neither give nor receive",
            "leave them out of the group",
        ),
        ((0,), (), None, "nobody receives", "leave the op out, or let a rank receive"),
        ((0, 1), (1,), 0, "some ranks give, others receive parts", "let all give, or all receive"),
    ],
)
def test_what_a_collective_may_be(
    ranks: tuple[int, ...],
    receivers: tuple[int, ...],
    concat: int | None,
    message: str | None,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shown by a broadcast that is another exchange."""
    exchange = Exchange(ranks, (0,), receivers, concat=concat)
    monkeypatch.setattr(Broadcast, "exchange", property(lambda op: exchange))
    x = Value("x", T)
    results = tuple(
        Value(
            f"r{rank}",
            TensorType(DType.F32, (2,), Place.of(rank))
            if rank in receivers
            else UnitType(Place.of(rank)),
        )
        for rank in ranks
    )
    module = parse_module("module @m phase=placed world=3 {\n}")
    broadcast = Broadcast((x,), results, group=Place(ranks))
    module.programs = [Program("m", [x], [broadcast, Return()])]
    if message is None:
        verify(module)
    else:
        found = errors(module)
        assert f"broadcast of {Place(ranks)}: {message}" in found
        assert f"help: {remedy}" in found


def test_declarations_are_in_the_table_under_their_names() -> None:
    module = module_of([], [Return()])
    module.functions["g"] = module.functions["f"]
    assert "function @f is in the table as @g" in errors(module)
    module = module_of([], [Return()])
    module.vjps["w"] = module.vjps["v"]
    assert "vjp @w: it is in the table as @w, but its name is @v" in errors(module)
    module = parse_module(ASYNC)
    module.channels[2] = module.channels[0]
    assert "channel 0 is in the table as 2" in errors(module)


def test_each_wrong_op_is_reported_once_and_its_users_not_at_all() -> None:
    text = TRACED.replace("fn = @f,", "fn = @ff,", 1).replace("fn = @drop,", "fn = @dropp,")
    with pytest.raises(IRError) as caught:
        verify(parse_module(text))
    assert [d.message.split(",")[0] for d in caught.value.diagnostics] == [
        "call of @ff",
        "call of @dropp",
    ]


@pytest.mark.parametrize(
    ("channel", "recv", "message"),
    [
        ("slots = 1, slot_bytes = 15", "slot = 0", "recv 1 of channel 0 takes 16 bytes, and the"),
        ("slots = 0, slot_bytes = 15", "", "recv 0 of channel 0 takes 16 bytes, and the channel's"),
        ("slots = 1, slot_bytes = 16", "slot = 0", ""),
        ("slots = 1, slot_bytes = 0", "", ""),
        ("slots = 1", "slot = 0", ""),
    ],
)
def test_a_message_fits_into_its_slot(channel: str, recv: str, message: str) -> None:
    """Without slots, `slot_bytes` are those of the largest message into a buffer, as %a is."""
    text = SCHEDULED.replace("ranks = {0,1}}", f"ranks = {{0,1}}, {channel}}}")
    slot = f", {recv}" if recv else ""
    text = text.replace(RECV1, RECV1.replace("seq = 1", f"seq = 1{slot}"))
    if message:
        assert message in errors(parse_module(text))
    else:
        verify(parse_module(text))
