"""Transports chosen for values, and programs cut into graphs, where ranks have devices."""

from __future__ import annotations

import pytest

from cg.backends.failures.participants import is_device_only
from cg.ir.attributes import Stream
from cg.ir.ops import Recv, Send, Transfer
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.lower.capture import Capture, describe
from cg.passes.lower.split_tails import SplitTails
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.placement.choose_transports import ChooseTransports
from cg.passes.placement.fabrics import Fabrics
from cg.passes.placement.insert_transfers import InsertTransfers
from cg.passes.placement.split_transfers import SplitTransfers

RANKS = "nccl+nccl+-"


def traced(body: str, result: str = "f32[4]") -> Module:
    return parse_module(f"""
module @s phase=traced world=3 {{
  function @a.f(f32[4]) -> ({result}) {{actor = a, kind = opaque}}
  function @b.g({result}) -> (f32[4]) {{actor = b, kind = opaque}}
  program @s(%x: f32[4]@{{0..2}}) {{
    %h = call(%x) {{fn = @a.f}} : {result}@0
{body}
    return(%y) {{at = {{1}}}}
  }}
}}
""")


def transfers(module: Module, **options: str) -> list[tuple[str | None, str | None]]:
    PassManager((InsertTransfers(), ChooseTransports(RANKS, "f32", **options))).run(module)
    found = [op for op in module.program.ops if isinstance(op, Transfer)]
    return [(op.via, op.why) for op in found]


def test_a_tensor_between_devices_goes_by_what_joins_them() -> None:
    module = traced("    %y = call(%h) {fn = @b.g} : f32[4]@1")
    assert transfers(module) == [("nccl", "a tensor from device to device")]
    PassManager((SplitTransfers(),)).run(module)
    (channel,) = module.channels.values()
    assert (channel.via, channel.why) == ("nccl", "a tensor from device to device")


def test_what_concerns_a_rank_without_a_device_goes_by_the_host() -> None:
    module = traced("    %y = call(%h) {fn = @b.g} : f32[4]@2")
    assert transfers(module)[0] == ("cpu", "rank 2 has no device")


def test_objects_go_by_the_host() -> None:
    module = traced("    %y = call(%h) {fn = @b.g} : f32[4]@1", result="object")
    assert transfers(module) == [("cpu", "an object")]


def test_the_user_chooses() -> None:
    body = """
    %r = transfer(%h) {via = mpi} : f32[4]@0
    %y = call(%r) {fn = @b.g} : f32[4]@1"""
    assert transfers(traced(body)) == [("mpi", "asked for by cg.via")]


@pytest.mark.parametrize(
    ("result", "rank", "message"),
    [
        ("object", 1, "'nccl' is to carry an object, and it carries tensors between devices alone"),
        ("f32[4]", 2, "'nccl' is to carry a value, but rank 2 has no device that it joins"),
    ],
)
def test_the_user_cannot_choose_what_cannot_be(result: str, rank: int, message: str) -> None:
    body = f"""
    %r = transfer(%h) {{via = nccl}} : {result}@0
    %y = call(%r) {{fn = @b.g}} : f32[4]@{rank}"""
    with pytest.raises(IRError, match=message):
        transfers(traced(body, result))


def test_a_traced_transfer_stays_where_it_is() -> None:
    module = traced("    %y = transfer(%h) {via = nccl} : f32[4]@1")
    with pytest.raises(IRError, match="a transfer in phase traced only says how"):
        PassManager((InsertTransfers(),)).run(module)


PROGRAM = """
module @s phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  function @a.update() -> (unit) {actor = a, kind = opaque}
  channel 0 {ranks = {0..1}, via = nccl}
  channel 1 {ranks = {1,0}, via = nccl}
  program @0(%x: f32[4]) {
    %r = recv() {chan = 1, peer = 1, seq = 0} : future<f32[4]>
    %h = call(%x) {fn = @a.f} : f32[4]
    %d = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit>
    wait(%d)
    HOST
    %v = wait(%r) : f32[4]
    %a = call(%v) {fn = @a.f} : f32[4]
    %b = call(%a) {fn = @a.f} : f32[4]
    return(%b)
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    %v = wait(%r) : f32[4]
    %d = send(%v) {chan = 1, peer = 0, seq = 0} : future<unit>
    wait(%d)
    return()
  }
}
"""


def graphs(text: str, driven: bool = False) -> list[int | None]:
    module = parse_module(text)
    PassManager((Capture("nccl+nccl", driven),)).run(module)
    return [op.graph for op in module.program_of(0).ops]


def test_a_program_without_the_host_is_one_graph() -> None:
    assert graphs(PROGRAM.replace("HOST", "")) == [0] * 7 + [None]


def test_the_host_cuts_it_and_a_receive_under_way_is_of_neither_part() -> None:
    text = PROGRAM.replace("HOST", "%u = call() {fn = @a.update} : unit")
    assert graphs(text) == [None, 0, 0, 0, None, None, 1, 1, None]
    module = parse_module(text)
    PassManager((Capture("nccl+nccl"),)).run(module)
    assert describe(module, Fabrics("nccl+nccl")).splitlines() == [
        "rank 0: 2 graphs",
        "  cut 1 times: a receive that goes on beside what the host does",
        "  cut 1 times: @a.update is opaque",
        "  cut 1 times: a wait for what goes on beside that",
        "rank 1: one graph, the whole program",
    ]


SMALL = """
module @s phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  program @0(%x: f32[4]) {
    OPS
    return(%h)
  }
  program @1() { return() }
}
"""
COPY = "%h = copy(%x) : f32[4]"
CALL = "%h = call(%x) {fn = @a.f} : f32[4]"


@pytest.mark.parametrize(
    ("ops", "captures", "why"),
    [
        (COPY, True, "a part with 1 of the 2 ops that are worth a graph"),
        (COPY, False, "a part with 1 of the 2 ops that are worth a graph"),
        (CALL, False, "the pass `capture` is switched off"),
    ],
)
def test_a_part_that_is_no_graph_says_why(ops: str, captures: bool, why: str) -> None:
    module = parse_module(SMALL.replace("OPS", ops))
    if captures:
        PassManager((Capture("nccl+nccl"),)).run(module)
    assert describe(module, Fabrics("nccl+nccl")).splitlines() == [
        "rank 0: 0 graphs",
        f"  left out 1 times: {why}",
        "rank 1: nothing to do",
    ]


def test_a_single_call_may_be_a_graph() -> None:
    module = parse_module(SMALL.replace("OPS", CALL))
    PassManager((Capture("nccl+nccl"),)).run(module)
    assert describe(module, Fabrics("nccl+nccl")).startswith("rank 0: one graph, the whole program")


def test_where_hosts_announce_messages_only_what_is_between_them_is_captured() -> None:
    text = PROGRAM.replace("HOST", "%u = call() {fn = @a.update} : unit")
    assert graphs(text, driven=True) == [None, 0, None, None, None, None, 1, 1, None]


@pytest.mark.parametrize("effect", ["read", "update", "accumulate", "write"])
def test_a_driven_step_that_needs_no_host_is_one_graph(effect: str) -> None:
    text = PROGRAM.replace("HOST", "").replace("effect = read", f"effect = {effect}")
    assert graphs(text, driven=True) == [0] * 7 + [None]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("HOST", "%u = call() {fn = @a.update} : unit"),  # opaque: it may raise
        ("channel 1 {ranks = {1,0}, via = nccl}", "channel 1 {ranks = {1,0}, via = cpu}"),
    ],
)
def test_one_rank_that_needs_its_host_is_enough_for_announcements(before: str, after: str) -> None:
    assert before in PROGRAM
    module = parse_module(PROGRAM.replace(before, after).replace("HOST", ""))
    PassManager((Capture("nccl+nccl", True),)).run(module)
    assert not is_device_only(module)
    messages = [op for p in module.programs for op in p.ops if isinstance(op, Send | Recv)]
    assert [op.graph for op in messages] == [None] * len(messages)


SWAP = """
module @s phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  function @a.update() -> (unit) {actor = a, kind = opaque}
  channel 0 {ranks = {0..1}, via = hccl}
  channel 1 {ranks = {1,0}, via = hccl}
  program @0(%x: f32[4]) {
    %h = call(%x) {fn = @a.f} : f32[4]
    %d = send(%h) {batch = 0, chan = 0, peer = 1, seq = 0} : future<unit>
    %r = recv() {batch = 0, chan = 1, peer = 1, seq = 0} : future<f32[4]>
    %a = call(%h) {fn = @a.f} : f32[4]
    %b = call(%a) {fn = @a.f} : f32[4]
    %u = call() {fn = @a.update} : unit
    wait(%d)
    %v = wait(%r) : f32[4]
    return(%b, %v)
  }
  program @1(%x: f32[4]) {
    %d = send(%x) {batch = 0, chan = 1, peer = 0, seq = 0} : future<unit>
    %r = recv() {batch = 0, chan = 0, peer = 0, seq = 0} : future<f32[4]>
    wait(%d)
    %v = wait(%r) : f32[4]
    return(%v)
  }
}
"""


def test_a_batch_is_not_torn_apart() -> None:
    """The receive is posted ahead of what the host does and awaited behind it: in no graph."""

    def graphs(text: str) -> list[int | None]:
        module = parse_module(text)
        PassManager((Capture("hccl+hccl"),)).run(module)
        return [op.graph for op in module.program_of(0).ops][:5]

    assert graphs(SWAP.replace("batch = 0, ", "")) == [0, 0, None, 1, 1]
    assert graphs(SWAP) == [0, None, None, 1, 1]


def test_nothing_in_a_graph_overtakes_what_is_posted_outside() -> None:
    """The receive is of no graph, so what comes behind it on its stream is of none, either."""
    text = PROGRAM.replace("via = nccl", "via = hccl").replace(
        "HOST", "%u = call() {fn = @a.update} : unit"
    )
    text = text.replace("seq = 0}", "seq = 0, stream = message}")

    def graphs(rendezvous: str) -> list[int | None]:
        module = parse_module(text)
        PassManager((Capture("hccl+hccl", rendezvous=rendezvous),)).run(module)
        return [op.graph for op in module.program_of(0).ops]

    assert graphs("") == [None, 0, 0, 0, None, None, 1, 1, None]
    assert graphs("hccl") == [None, 0, None, None, None, None, 1, 1, None]


def test_a_rank_without_a_device_captures_nothing() -> None:
    module = parse_module(PROGRAM.replace("HOST", ""))
    assert not Capture("-+-").run(module)


def test_transports_that_do_messages_one_after_the_other() -> None:
    """Both directions are on one stream, and what crosses is a batch."""
    text = PROGRAM.replace("HOST", "").replace("via = nccl", "via = hccl")
    module = parse_module(text)
    fabrics = Fabrics("hccl+hccl", rendezvous="hccl")
    steps = [
        p
        for p in default_pipeline(fabrics=fabrics)
        if p.name in ("batch-messages", "assign-streams")
    ]
    PassManager(tuple(steps)).run(module)
    ops = [op for op in module.program_of(0).ops if isinstance(op, Send | Recv)]
    assert [(op.opcode, op.stream, op.batch) for op in ops] == [
        ("send", Stream.MESSAGE, None),
        ("recv", Stream.MESSAGE, None),
    ]


def tailed(text: str) -> tuple[list[int | None], bool]:
    """The graphs of rank 0's ops behind `capture` and `split-tails`, and whether that cut any."""
    module = parse_module(text)
    PassManager((Capture("nccl+nccl", True),)).run(module)
    whole = format_module(module)
    assert is_device_only(module)
    changed = SplitTails().run(module)
    assert changed == (format_module(module) != whole)
    return [op.graph for op in module.program_of(0).ops], changed


WHOLE = PROGRAM.replace("HOST", "")
FIRST_CALL = "%h = call(%x) {fn = @a.f} : f32[4]"


def test_what_comes_back_last_is_a_tail() -> None:
    assert tailed(WHOLE) == ([0] * 3 + [1] * 4 + [None], True)
    module = parse_module(WHOLE)
    PassManager((Capture("nccl+nccl", True), SplitTails())).run(module)
    assert describe(module, Fabrics("nccl+nccl")).splitlines() == [
        "rank 0: one graph and its tail, the whole program",
        "rank 1: one graph, the whole program",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Whoever drives the graph reads gradients by themselves.
        ("effect = read", "effect = accumulate"),
        # There is nothing that the next execution could do meanwhile.
        (FIRST_CALL, "%h = constant() {fill = 1.0} : f32[4]"),
        # Rank 1 takes nothing before it is rid of what rank 0 would receive in the tail.
        (
            "    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>\n"
            "    %v = wait(%r) : f32[4]\n"
            "    %d = send(%v) {chan = 1, peer = 0, seq = 0} : future<unit>\n    wait(%d)\n",
            "    %c = constant() {fill = 1.0} : f32[4]\n"
            "    %d = send(%c) {chan = 1, peer = 0, seq = 0} : future<unit>\n    wait(%d)\n"
            "    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>\n"
            "    %v = wait(%r) : f32[4]\n",
        ),
    ],
)
def test_what_stays_whole(before: str, after: str) -> None:
    assert before in WHOLE
    text = WHOLE.replace(before, after)
    graphs, changed = tailed(text)
    assert not changed
    assert set(graphs) == {0, None}


def test_no_message_is_received_ahead_of_one_that_is_posted_before_it() -> None:
    """Rank 0 awaits the second message of rank 1 first, and sends something back."""
    text = """
module @s phase=scheduled world=2 {
  function @a.f(f32[4]) -> (f32[4]) {actor = a, effect = read}
  channel 0 {ranks = {0..1}, via = nccl}
  channel 1 {ranks = {1,0}, via = nccl}
  program @0(%x: f32[4]) {
    %r = recv() {chan = 1, peer = 1, seq = 0} : future<f32[4]>
    %q = recv() {chan = 1, peer = 1, seq = 1} : future<f32[4]>
    %w = wait(%q) : f32[4]
    %h = call(%w) {fn = @a.f} : f32[4]
    %d = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit>
    wait(%d)
    %v = wait(%r) : f32[4]
    return(%v)
  }
  program @1(%x: f32[4]) {
    %d = send(%x) {chan = 1, peer = 0, seq = 0} : future<unit>
    %e = send(%x) {chan = 1, peer = 0, seq = 1} : future<unit>
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    wait(%d)
    wait(%e)
    %v = wait(%r) : f32[4]
    return(%v)
  }
}
"""
    assert tailed(text) == ([0] * 7 + [None], False)
    ahead = text.replace("chan = 1, peer = 1, seq = 0", "chan = 1, peer = 1, seq = 2")
    ahead = ahead.replace("chan = 1, peer = 1, seq = 1", "chan = 1, peer = 1, seq = 0")
    ahead = ahead.replace("chan = 1, peer = 1, seq = 2", "chan = 1, peer = 1, seq = 1")
    first, second = (line for line in ahead.splitlines() if "recv() {chan = 1" in line)
    ahead = ahead.replace(first, "X").replace(second, first).replace("X", second)
    # Rank 1 sends its second message when it has what rank 0 makes of the first.
    sent = "    %e = send(%x) {chan = 1, peer = 0, seq = 1} : future<unit>\n"
    ahead = ahead.replace(sent, "").replace("    wait(%d)\n    wait(%e)\n", "    wait(%d)\n")
    ahead = ahead.replace("    return(%v)\n  }\n}", f"{sent}    wait(%e)\n    return(%v)\n  }}\n}}")
    assert tailed(ahead) == ([0] * 5 + [1] * 2 + [None], True)


def test_a_receive_into_a_part_of_a_whole_stays_where_it_is() -> None:
    text = WHOLE.replace(
        "%r = recv() {chan = 1",
        "%w, %p, %q = reserve() {regions = {[0:2], [2:4]}} : f32[4], f32[2], f32[2]\n"
        "    %g = constant() {fill = 1.0} : f32[2]\n"
        "    %c = copy(%g, %p) : f32[2]\n"
        "    %r = recv(%q) {chan = 1",
    )
    text = text.replace("seq = 0} : future<f32[4]>\n    %h", "seq = 0} : future<f32[2]>\n    %h")
    text = text.replace(
        "%v = wait(%r) : f32[4]\n    %a = call(%v)",
        "%v.2 = wait(%r) : f32[2]\n"
        "    %v = assemble(%w, %c, %v.2) {regions = {[0:2], [2:4]}} : f32[4]\n"
        "    %a = call(%v)",
    )
    text = text.replace(
        "%d = send(%v) {chan = 1",
        "%v.2 = slice(%v) {region = [0:2]} : f32[2]\n    %d = send(%v.2) {chan = 1",
    )
    graphs, changed = tailed(text)
    assert not changed
    assert set(graphs) == {0, None}


def test_storage_that_is_reserved_in_front_of_a_tail_keeps_the_program_whole() -> None:
    """What comes back is copied into a part of it: a tail would write to a copy."""
    text = WHOLE.replace(
        "%v = wait(%r) : f32[4]\n    %a = call(%v) {fn = @a.f} : f32[4]\n"
        "    %b = call(%a) {fn = @a.f} : f32[4]\n    return(%b)",
        "%w, %p, %q = reserve() {regions = {[0:4], [4:8]}} : f32[8], f32[4], f32[4]\n"
        "    %c = copy(%h, %p) : f32[4]\n"
        "    %v = wait(%r) : f32[4]\n"
        "    %e = copy(%v, %q) : f32[4]\n"
        "    %y = assemble(%w, %c, %e) {regions = {[0:4], [4:8]}} : f32[8]\n    return(%y)",
    )
    assert "reserve" in text
    graphs, changed = tailed(text)
    assert not changed
    assert set(graphs) == {0, None}


def test_what_has_been_received_is_no_tail() -> None:
    """Rank 0 sends on what it gets, and waits for the same message once more."""
    receive = "    %r = recv() {chan = 1, peer = 1, seq = 0} : future<f32[4]>\n"
    text = WHOLE.replace(receive, "").replace(
        "    wait(%d)\n    \n",
        f"    wait(%d)\n{receive}    %first = wait(%r) : f32[4]\n"
        "    %e = send(%first) {chan = 0, peer = 1, seq = 1} : future<unit>\n    wait(%e)\n",
    )
    text = text.replace(
        "    wait(%d)\n    return()",
        "    %q = recv() {chan = 0, peer = 0, seq = 1} : future<f32[4]>\n    wait(%d)\n"
        "    %w = wait(%q) : f32[4]\n    return()",
    )
    assert text.count("seq = 1") == 2
    CheckDeadlock().run(parse_module(text))
    graphs, changed = tailed(text)
    assert not changed
    assert set(graphs) == {0, None}
