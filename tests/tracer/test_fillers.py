"""Fillers: the same pytrees as torch's `tree_unflatten` makes, of any containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

from cg.tracer.values.specs import ObjectSpec, Static, Tree, filler

Pair = namedtuple("Pair", "left right")


class Bag:
    """A container of somebody's own, that keeps the list that it is made of."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bag) and self.items == other.items


register_pytree_node(Bag, lambda bag: (bag.items, None), lambda items, _: Bag(items))

LEAVES = st.one_of(st.just(ObjectSpec()), st.integers(0, 9).map(Static))
PYTREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.lists(inner, max_size=3).map(Bag),
    ),
    max_leaves=8,
)


def tree_of(pytree: Any) -> Tree:
    leaves, spec = tree_flatten(pytree)
    return Tree(tuple(leaves), spec)


@given(PYTREES)
def test_it_makes_what_torch_makes(pytree: Any) -> None:
    tree = tree_of(pytree)
    values = [f"value {index}" for index in range(len(tree.values))]
    supply = iter(values)
    expected = tree_unflatten(
        [leaf.value if isinstance(leaf, Static) else next(supply) for leaf in tree.leaves],
        tree.spec,
    )
    fill = filler(tree)
    for _ in range(2):  # nothing is used up
        made = fill(values)
        assert made == expected
        assert tree_flatten(made)[1] == tree.spec
    assert tree.fill(tuple(values)) == expected


def test_a_container_gets_a_list_that_is_its_own() -> None:
    values = (1, 2)
    bag = filler(tree_of(Bag([ObjectSpec(), ObjectSpec()])))(values)
    bag.items.append(3)
    assert (bag.items, values) == ([1, 2, 3], (1, 2))


def test_each_time_it_makes_new_containers() -> None:
    fill = filler(tree_of([ObjectSpec(), {"a": ObjectSpec()}]))
    first, second = fill((1, 2)), fill((1, 2))
    first.append(3)
    first[1]["b"] = 4
    assert second == [1, {"a": 2}]
