"""Messages in the virtual world: slots, isolation between ranks, and messages that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cg.backends.errors import BindError, DeadlockError, RemoteError
from cg.backends.virtual.world import VirtualExecutable

from .programs import CHAIN, CHAIN_BODIES, module, run

ZEROS, ONES = torch.zeros(2), torch.ones(2)


# -- slots ---------------------------------------------------------------------------------------


def two_messages(receiver: str) -> str:
    return f"""
    module @slots phase=scheduled world=2 {{
      function @b.see(f32[2]) -> (object) {{actor = b, effect = read, kind = opaque}}
      channel 0 {{ranks = {{0..1}}, slots = 1, slot_bytes = 8}}
      program @0(%x: f32[2], %y: f32[2]) {{
        %s = send(%x) {{chan = 0, peer = 1, seq = 0, slot = 0}} : future<unit>
        %t = send(%y) {{chan = 0, peer = 1, seq = 1, slot = 0}} : future<unit>
        wait(%s)
        wait(%t)
        return()
      }}
      program @1() {{
        %r = recv() {{chan = 0, peer = 0, seq = 0, slot = 0}} : future<f32[2]>
        %q = recv() {{chan = 0, peer = 0, seq = 1, slot = 0}} : future<f32[2]>
        %v = wait(%r) : f32[2]
        {receiver}
      }}
    }}
    """


GOOD = """
        %o = call(%v) {fn = @b.see} : object
        free(%v)
        %w = wait(%q) : f32[2]
        %c = copy(%w) : f32[2]
        free(%w)
        return(%o, %c)
"""
UNFREED = """
        %w = wait(%q) : f32[2]
        %o = call(%v) {fn = @b.see} : object
        return(%o, %w)
"""
USED_AFTER_FREE = """
        %u = copy(%v) : f32[2]
        %k = call(%v) {fn = @b.see} : object
        free(%v)
        %w = wait(%q) : f32[2]
        %c = copy(%w) : f32[2]
        free(%w)
        return(%k, %c)
"""


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_slot_takes_its_next_message_once_it_is_freed(shuffle: int | None) -> None:
    bodies = {"b.see": lambda x: (x.tolist(),)}
    executable = VirtualExecutable(module(two_messages(GOOD)), bodies, {}, shuffle=shuffle)
    for _ in range(3):
        _, (seen, last) = executable.run([[ZEROS, ONES], []])
        assert seen == [0.0, 0.0]
        assert torch.equal(last, ONES)


def test_a_slot_that_is_never_freed_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(two_messages(UNFREED), [[ZEROS, ONES], []], {"b.see": lambda x: (0,)})
    assert "but rank 1 has not freed slot 0" in str(caught.value)
    assert "cycle: rank 1 -> rank 1" in str(caught.value)


def test_poison_shows_in_what_is_kept_of_a_freed_slot() -> None:
    kept: list[torch.Tensor] = []

    def see(x: torch.Tensor) -> tuple[object]:
        kept.append(x)
        return (None,)

    text = two_messages(USED_AFTER_FREE)
    run(text, [[ZEROS, ONES], []], {"b.see": see}, poison=True)
    assert kept[0].isnan().all()


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1, 2]), torch.tensor([True, False]), torch.tensor([1 + 1j, 0])],
    ids=["integer", "bool", "complex"],
)
def test_poison_of_other_types(value: torch.Tensor) -> None:
    dtype = {torch.int64: "i64", torch.bool: "bool", torch.complex64: "c64"}[value.dtype]
    kept: list[torch.Tensor] = []

    def see(x: torch.Tensor) -> tuple[object]:
        kept.append(x)
        return (None,)

    text = two_messages(USED_AFTER_FREE).replace("f32[2]", f"{dtype}[2]")
    text = text.replace("slot_bytes = 8", f"slot_bytes = {value.nbytes}")
    run(text, [[value, value], []], {"b.see": see}, poison=True)
    if dtype == "c64":
        assert kept[0].isnan().all()
    else:
        limit = 1 if dtype == "bool" else torch.iinfo(torch.int64).max
        assert kept[0].tolist() == [limit, limit]


def test_a_view_keeps_its_slot_until_it_is_freed_too() -> None:
    receiver = """
        %n = view(%v) {dim = 0, start = 0, length = 1} : f32[1]
        free(%v)
        %o = copy(%n) : f32[1]
        free(%n)
        %w = wait(%q) : f32[2]
        %c = copy(%w) : f32[2]
        free(%w)
        return(%o, %c)
    """
    outputs = run(two_messages(receiver), [[ONES, ZEROS], []], poison=True)
    assert outputs[1][0].tolist() == [1.0]


def test_receive_into_the_arena() -> None:
    text = """
    module @arena phase=scheduled world=2 {
      channel 0 {ranks = {0..1}}
      program @0(%x: f32[2]) {
        %s = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>
        wait(%s)
        return()
      }
      program @1() {
        %a = alloc() {offset = 8} : f32[2]
        %b = alloc() {offset = 0} : f32[2]
        %r = recv(%a) {chan = 0, peer = 0, seq = 0} : future<f32[2]>
        %v = wait(%r) : f32[2]
        return(%v, %a, %b)
      }
    }
    """
    v, a, b = run(text, [[ONES], []])[1]
    assert torch.equal(v, ONES)
    assert v.data_ptr() == a.data_ptr() == b.data_ptr() + 8


def test_what_shares_a_freed_slot_and_is_used_later_keeps_it() -> None:
    receiver = """
        %n = view(%v) {dim = 0, start = 0, length = 1} : f32[1]
        %m = wait(%v) {stream = send} : f32[2]
        free(%v)
        %o = copy(%n) : f32[1]
        %p = copy(%m) : f32[2]
        return(%o, %p)
    """
    text = two_messages(receiver).replace("wait(%t)", "")
    one = "\n".join(
        line.replace("slot = 0}", "slot = 0, stream = message}")
        for line in text.splitlines()
        if "%t = send" not in line and "%q = recv" not in line
    )
    executable = VirtualExecutable(module(one), {"b.see": lambda x: (0,)}, {}, poison=True)
    for _ in range(2):
        _, (part, whole) = executable.run([[ONES, ZEROS], []])
        assert part.tolist() == [1.0]
        assert whole.tolist() == [1.0, 1.0]


# -- isolation -----------------------------------------------------------------------------------

PASS = """
module @pass phase=scheduled world=2 {
  function @b.change(TYPE) -> (object) {actor = b, effect = write, kind = opaque}
  channel 0 {ranks = {0..1}}
  program @0(%x: TYPE) {
    %s = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>
    wait(%s)
    return(%x)
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<TYPE>
    %v = wait(%r) : TYPE
    %o = call(%v) {fn = @b.change} : object
    return(%v)
  }
}
"""


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("f32[2]", torch.zeros(2)),
        ("object", torch.zeros(2)),
        ("object", np.zeros(2)),
        ("object", [0, 0]),
    ],
)
def test_a_receiver_that_changes_its_value_does_not_change_the_senders(
    type_: str, value: Any
) -> None:
    def change(x: Any) -> tuple[object]:
        x[0] = 7
        return (None,)

    outputs = run(PASS.replace("TYPE", type_), [[value], []], {"b.change": change})
    assert outputs[0][0] is value
    assert value[0] == 0
    assert outputs[1][0][0] == 7


def test_what_arrives_is_contiguous_and_needs_no_grad() -> None:
    x = torch.nn.Parameter(torch.zeros(3, 2)).t()
    outputs = run(PASS.replace("TYPE", "f32[2,3]"), [[x], []], {"b.change": lambda x: (None,)})
    assert outputs[1][0].is_contiguous()
    assert not outputs[1][0].requires_grad


def test_units_travel() -> None:
    text = PASS.replace("TYPE", "unit").replace("function @b.change(unit)", "function @b.change()")
    text = text.replace("call(%v)", "call()").replace("return(%v)", "return(%o)")
    assert run(text, [[None], []], {"b.change": lambda: ("done",)})[1] == ("done",)


def test_an_object_that_cannot_be_pickled_is_an_error_with_the_reason() -> None:
    with pytest.raises(
        RemoteError, match="type function cannot be pickled, so it cannot go to another rank"
    ) as caught:
        run(PASS.replace("TYPE", "object"), [[lambda: 0], []], {"b.change": lambda x: (None,)})
    assert caught.value.type_name == "cg.TransportError"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex32], ids=str)
def test_objects_travel_with_tensors_of_any_type(dtype: torch.dtype) -> None:
    x = torch.arange(4, dtype=torch.float32).to(dtype)
    seen: list[Any] = []
    run(PASS.replace("TYPE", "object"), [[{"x": x}], []], {"b.change": lambda v: (seen.append(v),)})
    (found,) = seen
    assert found["x"].dtype is dtype
    assert found["x"].view(torch.uint8).equal(x.view(torch.uint8))
    assert found["x"].data_ptr() != x.data_ptr()


def test_ranks_do_not_share_an_input_tensor() -> None:
    text = """
    module @inputs phase=scheduled world=2 {
      program @0(%x: f32[2], %y: f32[2]) { return(%x, %y) }
      program @1(%x: f32[2], %y: object) { return(%x, %y) }
    }
    """
    x, tag = torch.ones(2), object()
    first, second = run(text, [[x, x], [x, tag]])
    assert first[0] is x
    assert first[1] is x
    assert second[0] is not x
    assert torch.equal(second[0], x)
    assert second[1] is tag


# -- programs that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%r = recv() {chan = 0, peer = 0", "%r = recv() {chan = 0, peer = 1", "channel 0 leads"),
        ("channel 0 {ranks = {0..1}}", "channel 0 {ranks = {1,0}}", "channel 0 leads"),
        (
            "channel 0 {ranks = {0..1}}",
            "channel 0 {collective = true, ranks = {0..1}}",
            "channel 0 leads",
        ),
        ("peer = 1, seq = 0}", "peer = 1, seq = 0, slot = 3}", "channel 0 has 1 slots"),
    ],
)
def test_ops_that_do_not_fit_their_channel(old: str, new: str, message: str) -> None:
    text = CHAIN.replace(old, new).replace("{0..1}}", "{0..1}, slots = 1}")
    with pytest.raises(BindError, match=message):
        VirtualExecutable(module(text, check=False), CHAIN_BODIES, {})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("peer = 0, seq = 0} : future<f32[4]>", "peer = 0, seq = 1} : future<f32[4]>"),
        ("peer = 0, seq = 0} : future<f32[4]>", "peer = 0, seq = 0} : future<f32[2]>"),
        ("peer = 0, seq = 0} : future<f32[4]>", "peer = 0, seq = 0, slot = 0} : future<f32[4]>"),
    ],
)
def test_messages_that_do_not_match_are_an_error(old: str, new: str) -> None:
    executable = VirtualExecutable(module(CHAIN.replace(old, new), check=False), CHAIN_BODIES, {})
    with pytest.raises(RemoteError, match="messages of channel 0 do not match: rank 0 sends"):
        executable.run([[torch.zeros(4)], [], []])
