"""Calls that give operands away: their body holds the only reference, and drops it when it will."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.errors import RemoteError
from cg.backends.program.binder import Binder
from cg.backends.program.executor import poll_only
from cg.backends.program.linked import LinkedProgram

from .programs import local, module
from .test_executor import executable


class Number:
    """An object of which it can be told whether anybody holds it."""

    def __init__(self, number: int) -> None:
        self.number = number


class Adds:
    """A body that takes a list, and notes which inputs are alive once it has emptied it."""

    def __init__(self) -> None:
        self.alive: list[list[bool]] = []

    def __call__(self, *inputs: Number) -> Sequence[Number]:
        return (Number(1 + sum(each.number for each in inputs)),)

    def run_boxed(self, inputs: list[Number]) -> Sequence[Number]:
        refs = [*map(weakref.ref, inputs)]
        results = self(*inputs)
        inputs.clear()
        self.alive.append([ref() is not None for ref in refs])
        return results


def plain(*inputs: Number) -> Sequence[Number]:
    """The same, by arguments alone."""
    return Adds()(*inputs)


def functions(most: int) -> str:
    kind = "(object) {effect = pure, kind = graph}"
    return "\n".join(
        f"function @f{n}({', '.join(['object'] * n)}) -> {kind}" for n in range(1, most + 1)
    )


ONE = "%a = call(%x) {fn = @f1} : object\n"


@pytest.mark.parametrize(
    ("ops", "alive"),
    [
        ("%y = call(%a, %x) {fn = @f2} : object\nfree(%a)\nreturn(%y)", [False, True]),
        ("%y = call(%a, %a) {fn = @f2} : object\nfree(%a)\nreturn(%y)", [False, False]),
        ("%y = call(%a, %x) {fn = @f2} : object\nreturn(%y)", [True, True]),
        ("%y = call(%a, %x) {fn = @f2} : object\nreturn(%y, %a)", [True, True]),
        (
            "%y = call(%a, %x) {fn = @f2} : object\n%z = copy(%x) : object\nfree(%a)\n"
            "return(%y, %z)",
            [True, True],
        ),
        (
            "%y = call(%a, %x) {fn = @f2} : object\nfree(%a)\n%z = copy(%x) : object\n"
            "free(%x)\nreturn(%y, %z)",
            [False, True],
        ),
        (
            "%y = call(%a, %x) {fn = @f2} : object\nfree(%x)\nfree(%a)\nreturn(%y)",
            [False, True],  # the caller holds what it has passed
        ),
    ],
)
def test_what_is_freed_behind_a_call_is_given_away(ops: str, alive: list[bool]) -> None:
    body = Adds()
    text = local(functions(2), "%x: object", ONE + ops)
    program = executable(text, bodies={"f1": Adds(), "f2": body})
    for _ in range(2):
        x = Number(1)
        assert program.run([x], poll_only)[0].number == 2 + 1 + (1 if "%a, %x" in ops else 2)
    assert body.alive in ([alive] * 2, [])  # none: the call gives nothing away, and is as any other
    assert body.alive or all(alive)


def test_an_error_leaves_nothing_behind() -> None:
    class Fails(Adds):
        fails = True

        def __call__(self, *inputs: Number) -> Sequence[Number]:
            if self.fails:
                raise KeyError("no")
            return super().__call__(*inputs)

    body = Fails()
    text = local(
        f"{functions(1)}\nfunction @g(object) -> (object) {{effect = pure, kind = graph}}",
        "%x: object",
        ONE + "%y = call(%a) {fn = @g} : object\nfree(%a)\nreturn(%y)",
    )
    program = executable(text, bodies={"f1": Adds(), "g": body})
    with pytest.raises(RemoteError, match="KeyError"):
        program.run([Number(1)], poll_only)
    program.reset()
    body.fails = False
    assert program.run([Number(1)], poll_only)[0].number == 3
    assert body.alive == [[False]]


def test_a_free_empties_the_register_too() -> None:
    """A replay of a device's graph, or an error, may stand for the call."""
    text = local(
        functions(1), "%x: object", ONE + "%y = call(%a) {fn = @f1} : object\nfree(%a)\nreturn(%y)"
    )
    code = Binder(LinkedProgram(module(text), 0, {"f1": Adds()})).bind()
    assert sum(info.is_clear for info in code.infos) == 1


@given(st.data())
def test_programs_give_what_they_give_by_arguments(data: st.DataObject) -> None:
    """Of random programs with a `free` at or behind the last use of some values."""
    ops: list[tuple[str, list[str]]] = []
    known = ["%x"]
    for number in range(data.draw(st.integers(1, 6))):
        operands = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
        ops.append((f"%v{number}", operands))
        known.append(f"%v{number}")
    returned = data.draw(st.lists(st.sampled_from(known[1:]), min_size=1, unique=True))
    lines: list[str] = []
    for at, (result, operands) in enumerate(ops):
        lines.append(f"{result} = call({', '.join(operands)}) {{fn = @f{len(operands)}}} : object")
        later = {name for _, others in ops[at + 1 :] for name in others} | set(returned)
        done = sorted({*operands, result} - later)
        lines += [f"free({name})" for name in done if data.draw(st.booleans())]
    text = local(functions(4), "%x: object", "\n".join([*lines, f"return({', '.join(returned)})"]))
    found = []
    for body in (plain, Adds()):
        program = executable(text, bodies={f"f{n}": body for n in range(1, 5)})
        for _ in range(2):
            found.append([each.number for each in program.run([Number(1)], poll_only)])
    assert found == [found[0]] * 4
