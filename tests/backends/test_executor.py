"""One rank's program: values, calls, checks, errors, and what can be asked of an executable."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cg.backends.base import Body
from cg.backends.errors import BindError, InputError, RemoteError, ResultError, StepTimeout
from cg.backends.failures.flight import FlightRecord
from cg.backends.program.executor import Executable, poll_only
from cg.backends.program.linked import LinkedProgram
from cg.backends.program.tracing import Budget, InstructionLog
from cg.backends.virtual.fabric import VirtualFabric
from cg.ir.location import Location

from .programs import CHAIN, CHAIN_BODIES, local, module


def executable(
    text: str,
    bodies: Mapping[str, Body] | None = None,
    constants: Mapping[str, Any] | None = None,
    rank: int = 0,
    check: bool = True,
) -> Executable:
    parsed = module(text, check)
    communicator = VirtualFabric().communicator(rank)
    communicators = dict.fromkeys(parsed.channels, communicator)
    return Executable(LinkedProgram(parsed, rank, bodies or {}, constants or {}, communicators))


def run(text: str, *inputs: Any, **options: Any) -> tuple[Any, ...]:
    return executable(text, **options).run(inputs, poll_only)


F = "function @f({}) -> ({}) {{effect = pure, kind = graph}}"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_calls_take_any_number_of_inputs(count: int) -> None:
    types = ", ".join(["f32[2]"] * count)
    params = ", ".join(f"%x{i}: f32[2]" for i in range(count))
    names = ", ".join(f"%x{i}" for i in range(count))
    text = local(
        F.format(types, "f32[2]"), params, f"%y = call({names}) {{fn = @f}} : f32[2]\nreturn(%y)"
    )
    seen: list[Any] = []

    def body(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        seen.extend(inputs)
        return (torch.ones(2),)

    inputs = [torch.full((2,), float(i)) for i in range(count)]
    (result,) = run(text, *inputs, bodies={"f": body})
    assert all(one is other for one, other in zip(seen, inputs, strict=True))
    assert torch.equal(result, torch.ones(2))


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_calls_return_any_number_of_values(count: int) -> None:
    names = ", ".join(f"%y{i}" for i in range(count))
    types = ", ".join(["object"] * count)
    left = f"{names} = " if count else ""
    right = f" : {types}" if count else ""
    text = local(
        F.format("object", types),
        "%x: object",
        f"{left}call(%x) {{fn = @f}}{right}\n%z = copy(%x) : object\nreturn(%z, {names})".replace(
            ", )", ")"
        ),
    )
    result = run(text, "x", bodies={"f": lambda x: [f"{x}{i}" for i in range(count)]})
    assert result == ("x", *[f"x{i}" for i in range(count)])


def test_call_runs_without_grad() -> None:
    text = local(F.format("f32[2]", "object"), "%x: f32[2]", CALL_OBJECT)
    seen = run(text, torch.ones(2), bodies={"f": lambda x: (torch.is_grad_enabled(),)})
    assert seen == (False,)
    assert torch.is_grad_enabled()


CALL_OBJECT = "%y = call(%x) {fn = @f} : object\nreturn(%y)"
CALL_TENSOR = "%y = call(%x) {fn = @f} : f32[2]\nreturn(%y)"


def test_view_and_copy() -> None:
    text = local(
        "",
        "%x: f32[4,2]",
        "%v = view(%x) {dim = 0, start = 1, length = 2} : f32[2,2]\n"
        "%c = copy(%v) : f32[2,2]\nreturn(%v, %c)",
    )
    x = torch.arange(8.0).view(4, 2)
    view, copied = run(text, x)
    assert torch.equal(view, x[1:3])
    assert view.data_ptr() == x[1].data_ptr()
    assert torch.equal(copied, view)
    assert copied.data_ptr() != view.data_ptr()


def test_copy_of_an_object_is_deep() -> None:
    original = {"a": [1], "t": torch.ones(2)}
    (copied,) = run(local("", "%x: object", "%c = copy(%x) : object\nreturn(%c)"), original)
    assert copied["a"] == [1]
    assert copied["a"] is not original["a"]
    assert copied["t"].data_ptr() != original["t"].data_ptr()


@pytest.mark.parametrize(
    ("type_", "fill", "expected"),
    [
        ("f32[2]", "1.5", torch.tensor([1.5, 1.5])),
        ("bf16[]", "2.0", torch.tensor(2.0, dtype=torch.bfloat16)),
        ("i64[1]", "3", torch.tensor([3])),
        ("bool[2]", "true", torch.tensor([True, True])),
    ],
)
def test_constant_by_fill(type_: str, fill: str, expected: torch.Tensor) -> None:
    text = local("", "", f"%c = constant() {{fill = {fill}}} : {type_}\nreturn(%c)")
    bound = executable(text)
    (first,) = bound.run([], poll_only)
    assert first.dtype == expected.dtype
    assert torch.equal(first, expected)
    first.zero_()
    (second,) = bound.run([], poll_only)
    assert torch.equal(second, expected), "a result that the user changes must not come back"


def test_constant_that_an_opaque_method_changes_is_fresh_each_time() -> None:
    text = local(
        "function @a.f(f32[2]) -> (f32[2]) {actor = a, effect = write, kind = opaque}",
        "",
        "%c = constant() {fill = 1.0} : f32[2]\n"
        "%v = view(%c) {dim = 0, start = 0, length = 2} : f32[2]\n"
        "%y = call(%v) {fn = @a.f} : f32[2]\nreturn(%y)",
    )
    bound = executable(text, {"a.f": lambda x: (x.add_(1).clone(),)})
    for _ in range(2):
        (result,) = bound.run([], poll_only)
        assert torch.equal(result, torch.full((2,), 2.0))


def test_constant_by_reference() -> None:
    text = local("", "", "%c = constant() {ref = @w} : f32[2]\nreturn(%c)")
    weight = torch.ones(2)
    assert run(text, constants={"w": weight}) == (weight,)
    with pytest.raises(BindError, match="there is no constant @w"):
        executable(text)
    with pytest.raises(BindError, match=r"constant @w is f32\[3\], not f32\[2\]"):
        executable(text, constants={"w": torch.ones(3)})


def test_builtin_add() -> None:
    text = local(
        "function @builtin.add.f32.2(f32[2], f32[2]) -> (f32[2]) {effect = pure, kind = builtin}",
        "%x: f32[2]",
        "%y = call(%x, %x) {fn = @builtin.add.f32.2} : f32[2]\nreturn(%y)",
    )
    (result,) = run(text, torch.ones(2))
    assert torch.equal(result, torch.full((2,), 2.0))


def test_wait_for_a_value_of_another_stream_costs_nothing() -> None:
    head = F.format("f32[2]", "f32[2]")
    plain = executable(local(head, "%x: f32[2]", CALL_TENSOR), {"f": lambda x: (x,)})
    waiting = executable(
        local(
            head,
            "%x: f32[2]",
            "%w = wait(%x) {stream = compute} : f32[2]\n"
            "%y = call(%w) {fn = @f, stream = compute} : f32[2]\n"
            "%z = wait(%y) {stream = send} : f32[2]\nreturn(%z)",
        ),
        {"f": lambda x: (x,)},
    )
    assert count(waiting) == count(plain) == 1
    x = torch.ones(2)
    assert waiting.run([x], poll_only)[0] is x


def count(bound: Executable) -> int:
    log = InstructionLog(bound.program, Budget(0))
    bound.record(log)
    bound.record(None)
    return len(log.origins)


def test_free_drops_a_value_once_nothing_shares_it() -> None:
    text = local(
        F.format("object", "object"),
        "%x: object",
        "%w = wait(%x) {stream = send} : object\nfree(%w)\n"
        "%y = call(%x) {fn = @f} : object\nfree(%x)\n%z = call(%y) {fn = @f} : object\nreturn(%z)",
    )
    alive: list[int] = []

    class Token:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    seen: list[int] = []

    def body(x: object) -> tuple[object]:
        seen.append(len(alive))
        return (None if x is None else "next",)

    bound = executable(text, {"f": body})
    bound.start([Token()])
    assert bound.step()
    assert seen == [1, 0], "freeing the alias must leave the value, freeing the value must not"


def test_registers_are_empty_after_an_execution() -> None:
    alive = []

    class Token:
        def __del__(self) -> None:
            alive.append("gone")

    bound = executable(
        local(F.format("object", "object"), "%x: object", CALL_OBJECT), {"f": lambda x: (1,)}
    )
    bound.run([Token()], poll_only)
    assert alive == ["gone"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "program @0 takes 1 inputs, got 0"),
        ([torch.ones(2)] * 2, "program @0 takes 1 inputs, got 2"),
        ([torch.ones(3)], r"input %x of program @0 must be f32\[2\], got f32\[3\]"),
        ([torch.ones(2).double()], r"must be f32\[2\], got f64\[2\]"),
        ([1.0], r"must be f32\[2\], got object \(float\)"),
        ([torch.ones(2).to(torch.float8_e5m2fnuz)], "got tensor of torch.float8_e5m2fnuz"),
    ],
)
def test_inputs_are_checked_before_anything_runs(inputs: list[Any], message: str) -> None:
    ran: list[int] = []

    def body(x: torch.Tensor) -> tuple[torch.Tensor]:
        ran.append(1)
        return (x,)

    bound = executable(local(F.format("f32[2]", "f32[2]"), "%x: f32[2]", CALL_TENSOR), {"f": body})
    with pytest.raises(InputError, match=message):
        bound.run(inputs, poll_only)
    assert not ran
    bound.run([torch.ones(2)], poll_only)
    assert ran == [1]


OPAQUE = local(
    "function @a.f(f32[2]) -> (f32[2]) {actor = a, effect = write, kind = opaque}"
    ' loc("model.py":7 in f)',
    "%x: f32[2]",
    '%y = call(%x) {fn = @a.f} : f32[2] loc("train.py":12 in step)\nreturn(%y)',
)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(3),), r"returned f32\[3\] as output 0, expected f32\[2\]"),
        ((torch.ones(2, dtype=torch.int32),), r"returned i32\[2\] as output 0"),
        ((None,), r"returned object \(NoneType\) as output 0"),
        ((torch.ones(2), torch.ones(2)), "returned 2 values, expected 1 values"),
        (torch.ones(2), r"returned f32\[2\], expected 1 values"),
    ],
)
def test_what_an_opaque_method_returns_is_checked(result: Any, message: str) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        run(OPAQUE, torch.ones(2), bodies={"a.f": lambda x: result})
    assert isinstance(caught.value.__cause__, ResultError)
    assert "a.f (model.py:7, in f)" in str(caught.value)


def test_a_graph_that_returns_too_many_values_is_an_error() -> None:
    text = local(
        F.format("", "f32[2], f32[2]"), "", "%x, %y = call() {fn = @f} : f32[2], f32[2]\nreturn()"
    )
    with pytest.raises(RemoteError, match="returned 3 values instead of 2"):
        run(text, bodies={"f": lambda: (1, 2, 3)})


def test_error_in_a_method_says_where_and_can_be_pickled() -> None:
    def broken(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise KeyError("weights")

    with pytest.raises(RemoteError) as caught:
        run(OPAQUE, torch.ones(2), bodies={"a.f": broken})
    error = caught.value
    assert isinstance(error.__cause__, KeyError)
    assert (error.type_name, error.rank, error.actor, error.method) == ("KeyError", 0, "a", "f")
    assert error.location == Location("train.py", 12, "step")
    text = str(error)
    assert text.startswith("KeyError on rank 0 in a.f: 'weights'")
    assert "called from train.py:12, in step" in text
    assert 'raise KeyError("weights")' in text
    assert "_advance" not in text, "the traceback begins in the method"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, RemoteError)
    assert again.failure == error.failure
    assert str(again) == text


def test_error_shows_the_source_line_of_the_step(tmp_path: Any) -> None:
    source = tmp_path / "train.py"
    source.write_text("import cg\n\nh = stage.forward(h)\n")
    text = OPAQUE.replace('"train.py":12', f'"{source}":3')

    def broken(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise ValueError("no")

    with pytest.raises(RemoteError, match=r"\n    h = stage\.forward\(h\)\n"):
        run(text, torch.ones(2), bodies={"a.f": broken})


def test_executable_runs_again_after_an_error_and_reset() -> None:
    fail = [True]

    def body(x: torch.Tensor) -> tuple[torch.Tensor]:
        if fail[0]:
            raise RuntimeError("once")
        return (x,)

    bound = executable(OPAQUE, {"a.f": body})
    with pytest.raises(RemoteError, match="once"):
        bound.run([torch.ones(2)], poll_only)
    with pytest.raises(RuntimeError, match="execution 0 has failed: reset"):
        bound.start([torch.ones(2)])
    with pytest.raises(RuntimeError, match="no execution is in progress"):
        bound.step()
    bound.reset()
    fail[0] = False
    assert torch.equal(bound.run([torch.ones(2)], poll_only)[0], torch.ones(2))


def test_start_twice_and_step_before_start_are_errors() -> None:
    bound = executable(OPAQUE, {"a.f": lambda x: (x,)})
    with pytest.raises(RuntimeError, match="no execution is in progress"):
        bound.step()
    bound.start([torch.ones(2)])
    with pytest.raises(RuntimeError, match="execution 0 is in progress"):
        bound.start([torch.ones(2)])
    assert bound.step()


def test_keyboard_interrupt_is_not_wrapped() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise KeyboardInterrupt

    bound = executable(OPAQUE, {"a.f": body})
    with pytest.raises(KeyboardInterrupt):
        bound.run([torch.ones(2)], poll_only)
    bound.reset()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPAQUE, "there is no body for @a.f; actor a must live on this rank"),
        (CHAIN, "there is no body for @a.inc"),
        (local("", "%x: f32[2]", "%y = call(%x) {fn = @g} : f32[2]\nreturn(%y)"), "no function @g"),
        (
            local(F.format("f32[2]", "f32[2]"), "", "%y = call() {fn = @f} : f32[2]\nreturn(%y)"),
            "@f takes 1 values and returns 1",
        ),
        (local("", "", "%y = alloc() {offset = 2} : f32[2]\nreturn()"), "not a multiple of 4"),
        (local("", "", "%y = alloc() {offset = 0} : object\nreturn()"), "`alloc` makes tensors"),
        (local("", "%x: f32[]", "backward(%x)\nreturn()"), "no backend runs `backward`"),
    ],
)
def test_what_cannot_be_bound_is_an_error(text: str, message: str) -> None:
    with pytest.raises(BindError, match=message) as caught:
        executable(text, {"f": lambda: ()}, check=False)
    assert "^" in str(caught.value), "the message draws the op"


def test_channel_without_communicator_is_an_error() -> None:
    parsed = module(CHAIN)
    with pytest.raises(BindError, match="no communicator serves channel 0"):
        Executable(LinkedProgram(parsed, 0, CHAIN_BODIES))
    parsed.channels.clear()
    with pytest.raises(BindError, match="declares no channel 0"):
        Executable(LinkedProgram(parsed, 0, CHAIN_BODIES))


def test_run_polls_until_the_pause_ends_it_and_says_where_it_waits() -> None:
    bound = executable(CHAIN, CHAIN_BODIES, rank=1)
    polls: list[int] = []

    def pause(count: int) -> None:
        polls.append(count)
        if count == 5:
            raise StepTimeout(FlightRecord(bound.module, [bound.position()]).describe())

    with pytest.raises(StepTimeout) as caught:
        bound.run([], pause)
    assert polls == [1, 2, 3, 4, 5]
    assert "rank 1 waits at `%v = wait(%r)" in str(caught.value)
    assert "it needs rank 0's send of message 0 of channel 0" in str(caught.value)


def test_what_a_pause_raises_reaches_the_caller_unchanged() -> None:
    class PeerFailed(Exception):
        pass

    def pause(polls: int) -> None:
        raise PeerFailed

    bound = executable(CHAIN, CHAIN_BODIES, rank=1)
    with pytest.raises(PeerFailed):
        bound.run([], pause)
    bound.reset()
    with pytest.raises(PeerFailed):
        bound.run([], pause)


def test_position_follows_the_execution() -> None:
    bound = executable(CHAIN, CHAIN_BODIES, rank=1)
    assert not bound.position().running
    bound.start([])
    assert (bound.position().op, bound.position().awaited) == (0, None)
    assert not bound.step()
    assert (bound.position().op, bound.position().awaited) == (1, 0)
    assert bound.position().running


def test_step_with_a_limit_runs_no_more_instructions_than_that() -> None:
    calls: list[int] = []

    def body(x: object) -> tuple[object]:
        calls.append(1)
        return (x,)

    text = local(
        F.format("object", "object"),
        "%x: object",
        "\n".join([f"%y{i} = call(%x) {{fn = @f}} : object" for i in range(5)] + ["return(%y4)"]),
    )
    bound = executable(text, {"f": body})
    bound.start(["x"])
    assert not bound.step(2)
    assert len(calls) == 2
    assert not bound.step(2)
    assert bound.step(2)
    assert len(calls) == 5
    assert bound.outputs == ("x",)


def test_recording_counts_and_can_be_switched_off() -> None:
    bound = executable(OPAQUE, {"a.f": lambda x: (x,)})
    log = InstructionLog(bound.program, Budget(10))
    bound.record(log)
    bound.run([torch.ones(2)], poll_only)
    bound.run([torch.ones(2)], poll_only)
    bound.record(None)
    bound.run([torch.ones(2)], poll_only)
    assert [origin.op for origin in log.origins] == [0]
    (first, second) = (log.events[:4], log.events[4:])
    assert (first[0], first[1], second[0], second[1]) == (0, 0, 0, 1)
    assert first[2] < first[3] <= second[2] < second[3]
    assert log.left_out == 0


def test_statistics_count_executions_and_blocked_time() -> None:
    bound = executable(OPAQUE, {"a.f": lambda x: (x,)})
    assert bound.statistics.bubble == 0.0
    bound.run([torch.ones(2)], poll_only)
    bound.run([torch.ones(2)], poll_only)
    statistics = bound.statistics
    assert statistics.executions == 2
    assert statistics.total >= statistics.last_total > 0
    assert statistics.blocked == statistics.bubble == statistics.last_bubble == 0.0


def test_executions_are_numbered_and_can_be_given_a_number() -> None:
    bound = executable(OPAQUE, {"a.f": lambda x: (x,)})
    assert bound.execution == -1
    bound.run([torch.ones(2)], poll_only)
    assert bound.execution == 0
    bound.run([torch.ones(2)], poll_only, execution=41)
    assert bound.execution == 41
    bound.run([torch.ones(2)], poll_only)
    assert bound.execution == 42


CALLS_F = "%y = call(%x) {fn = @f} : f32[2]\nreturn(%y)"


def test_a_program_that_nobody_holds_goes_at_once() -> None:
    """With its memory, and not when Python next looks for cycles."""
    body = torch.nn.ReLU()  # compiled classes have no weak references
    gone = weakref.ref(body)
    gc.disable()
    try:
        text = local(F.format("f32[2]", "f32[2]"), "%x: f32[2]", CALLS_F)
        made = executable(text, bodies={"f": lambda x, body=body: (body(x),)})
        made.run([torch.ones(2)], poll_only)
        del body
        assert gone() is not None
        del made
        assert gone() is None
    finally:
        gc.enable()
