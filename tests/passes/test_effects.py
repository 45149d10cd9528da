"""Which order dependencies keep, and that nothing else is kept."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given

from cg.ir.attributes import Effect, Shares, Symbol
from cg.ir.ops import Barrier, Call, Op, Value
from cg.ir.ops.module import Function, Module
from cg.ir.types import Place, UnitType
from cg.passes.frontend.effect_order import dependencies, effect_of

FUNCTIONS = {
    f"{actor}.{effect.value}": Function(
        f"{actor}.{effect.value}", (), (), effect=effect, actor=actor
    )
    for actor in ("a", "b")
    for effect in Effect
}
for word, effect, buckets in (
    ("adds-to-1", Effect.ACCUMULATE, (1,)),
    ("adds-to-both", Effect.ACCUMULATE, (0, 1)),
    ("reduces-1", Effect.REDUCE, (1,)),
):
    FUNCTIONS[f"a.{word}"] = Function(
        f"a.{word}", (), (), effect=effect, actor="a", buckets=buckets
    )
OUTSIDE = {
    f"outside.{effect.value}": Function(f"outside.{effect.value}", (), (), effect=effect)
    for effect in Effect
}


def call(name: str, rank: int = 0) -> Op:
    return Call((), (Value("u", UnitType(Place.of(rank))),), fn=Symbol(name))


def edges(*names: str) -> list[tuple[int, ...]]:
    return dependencies([call(name) for name in names], FUNCTIONS)


def test_a_write_keeps_its_order_against_all() -> None:
    assert edges("a.write", "a.read", "a.accumulate", "a.pure", "a.write", "a.write") == [
        (),
        (0,),
        (0,),
        (),
        (1, 2),
        (4,),
    ]


def test_a_reduction_keeps_its_order_against_what_adds_to_its_bucket() -> None:
    """Functions that name no bucket add to the first one, which is 0."""
    names = ("a.accumulate", "a.adds-to-1", "a.reduce", "a.reduces-1", "a.read", "a.update")
    assert edges(*names) == [(), (), (0,), (1,), (), (4,)]
    assert edges("a.adds-to-both", "a.reduce", "a.reduces-1", "a.adds-to-1", "a.write") == [
        (),
        (0,),
        (0,),
        (2,),
        (0, 1, 2, 3),
    ]


def test_actors_wait_for_each_other_where_they_share_state() -> None:
    """`a` shares with `b`, and `b` with `c`: so `a` and `c` do not wait for each other."""

    def shared(actor: str, effect: Effect, **others: Effect) -> Function:
        return Function(actor, (), (), effect=effect, actor=actor, shares=Shares.of(others))

    write, read = Effect.WRITE, Effect.READ
    functions = {
        "a": shared("a", read, b=read),
        "b": shared("b", write, a=write, c=write),
        "c": shared("c", write, b=read),
        "own": Function("own", (), (), effect=write, actor="a"),
    }

    def edges(*names: str) -> list[tuple[int, ...]]:
        return dependencies([call(name) for name in names], functions)

    assert edges("a", "b", "c", "a", "c") == [(), (0,), (1,), (1,), (1, 2)]
    assert edges("own", "b", "c") == [(), (), (1,)]
    assert functions["a"].conflicts_with(functions["b"])
    assert not functions["a"].conflicts_with(functions["c"])


def test_actors_do_not_wait_for_each_other() -> None:
    assert edges("a.write", "b.write", "a.read", "b.accumulate") == [(), (), (0,), (1,)]


def test_operands_and_effects_come_together(read: Callable[[str], Module]) -> None:
    module = read(
        """
        module @step phase=traced world=1 {
          function @get(f32[4]) -> (f32[4]) {actor = a, effect = read}
          function @set(f32[4]) -> (unit) {actor = a, effect = write}
          program @step(%x: f32[4]@0) {
            %v = view(%x) {dim = 0, length = 4, start = 0} : f32[4]@0
            %a = call(%v) {fn = @get} : f32[4]@0
            %b = call(%v) {fn = @get} : f32[4]@0
            %done = call(%a) {fn = @set} : unit@0
            return(%b) {at = {0}}
          }
        }
        """
    )
    ops = module.program.ops
    assert dependencies(ops, module.functions) == [(), (0,), (0,), (1, 2), (2,)]
    assert [effect_of(op, module.functions) for op in ops[2:]] == [
        Effect.READ,
        Effect.WRITE,
        Effect.PURE,
    ]


def test_effects_outside_of_actors_are_ordered_on_each_rank() -> None:
    ops = [call("outside.write", 0), call("outside.write", 1), call("outside.read", 0)]
    assert dependencies(ops, OUTSIDE) == [(), (), (0,)]


def test_a_barrier_is_ordered_against_the_effects_on_its_ranks() -> None:
    fence = Barrier((), (Value("f", UnitType(Place.of(0, 1))),), group=Place.of(0, 1))
    ops = [call("a.read", 0), call("b.read", 2), fence, call("a.read", 1), call("b.write", 2)]
    assert dependencies(ops, FUNCTIONS) == [(), (), (0,), (2,), (1,)]
    assert effect_of(fence, FUNCTIONS) is Effect.WRITE


@given(st.lists(st.sampled_from(sorted(FUNCTIONS)), max_size=25))
def test_exactly_the_conflicting_pairs_are_ordered(names: list[str]) -> None:
    """The transitive closure of the edges holds every conflicting pair, each edge is one."""
    reach: list[set[int]] = []
    found = edges(*names)
    for later, before in enumerate(found):
        reach.append(set(before).union(*(reach[earlier] for earlier in before)))
        for earlier in range(later):
            one, other = FUNCTIONS[names[earlier]], FUNCTIONS[names[later]]
            conflict = one.conflicts_with(other)
            assert conflict == other.conflicts_with(one)
            assert not conflict or earlier in reach[later]
            assert earlier not in before or conflict


def test_edges_stay_few() -> None:
    names = ["a.read", "a.accumulate"] * 500 + ["a.write"] + ["a.read"] * 1000 + ["a.write"]
    assert sum(map(len, edges(*names))) <= 2 * len(names)
