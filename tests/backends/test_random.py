"""Random numbers of keyed calls: reproducible, and nobody else's business."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.program.executor import Executable, poll_only
from cg.backends.program.linked import LinkedProgram
from cg.backends.program.random import call_seeds, seeded, splitmix64

from .programs import local, module

TWO_DRAWS = local(
    "function @f() -> (f32[4]) {effect = pure, kind = graph, random = true}",
    "",
    "%x = call() {fn = @f, key = 0} : f32[4]\n%y = call() {fn = @f, key = 1} : f32[4]\n"
    "return(%x, %y)",
)


def drawing(seed: int) -> Executable:
    parsed = module(TWO_DRAWS)
    bodies = {"f": lambda: (torch.rand(4),)}
    return Executable(LinkedProgram(parsed, 0, bodies, seed=seed))


def test_splitmix64_known_values() -> None:
    # The first outputs of the generator from state 1234567: each step adds the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * gamma) % 2**64) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(), st.integers(0, 2**40), st.integers(0, 2**20))
def test_seeds_fit_the_generator_and_differ_between_calls(
    seed: int, execution: int, key: int
) -> None:
    mixed = call_seeds(seed, key)(execution)
    torch.Generator().manual_seed(mixed)
    assert mixed == splitmix64(splitmix64(splitmix64(seed % 2**64) ^ execution) ^ key)
    others = {call_seeds(seed, key + 1)(execution), call_seeds(seed, key)(execution + 1)}
    assert mixed not in others


def test_draws_depend_on_seed_execution_and_key_alone() -> None:
    bound = drawing(seed=3)
    first = bound.run([], poll_only)
    torch.rand(7)
    second = bound.run([], poll_only)
    again = drawing(seed=3)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])
    assert torch.equal(again.run([], poll_only, execution=1)[1], second[1])
    assert torch.equal(again.run([], poll_only, execution=0)[0], first[0])
    assert not torch.equal(drawing(seed=4).run([], poll_only)[0], first[0])
    torch.manual_seed(call_seeds(3, 1)(0))
    assert torch.equal(torch.rand(4), first[1])


def test_the_users_generator_is_left_as_it_was() -> None:
    bound = drawing(seed=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bound.run([], poll_only)
    assert torch.equal(torch.rand(3), expected)


def test_the_users_generator_is_put_back_after_an_error() -> None:
    def fail() -> tuple[object]:
        torch.rand(3)
        raise ValueError("drawn")

    before = torch.default_generator.get_state()
    with pytest.raises(ValueError, match="drawn"):
        seeded(fail, 0, 0, lambda: 0)()
    assert torch.equal(torch.default_generator.get_state(), before)
