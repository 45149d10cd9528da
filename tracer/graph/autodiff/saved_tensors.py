"""The tensors that a forward saves for its backward, and what computing them again would cost.

A joint graph becomes a problem of values and operators (`saving_problem.py`). A value is a tensor
with memory of its own: a view counts as its base, and a result of an operator with several results
counts by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ....ir.flops import WORK_OF_BYTE
from ....ir.location import Location
from ....ir.pipeline.tradeoff import SavingPoint, Tradeoff
from ...errors import TraceError
from ...lazy import Lazy
from ...method.joint_graph import Joint, JointNodes
from ...method.node_memory import memory_of
from ...method.purity.flops import flops_of
from ...method.reuse.saving_functions import KEEP, OFFLOAD, RECOMPUTE
from ...method.saving_marks import mark_of
from ...values.operators import storage_key, written_values
from .backward_cut import BackwardCut
from .narrowing import narrowable, narrowed_bytes
from .saving_problem import Frontier, SavingChoice, SavingProblem
from .subgraphs import fake_of, has_effect


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a forward saves for its backward.

    Attributes:
        name: of its node in the joint graph.
        operator: the operator that gives it; the kind of its node where no operator does.
        shape, dtype, nbytes: of the tensor.
        work: the work of that operator, in floating-point operations, where a byte that is read or
            written counts as `WORK_OF_BYTE`.
        takes: the names of the values that the operator takes.
        is_recomputable: whether the backward could run the operator again.
        loc: the user's line.
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    work: int
    takes: tuple[str, ...]
    is_recomputable: bool
    loc: Location | None


class Savings:
    """The values of a joint graph's forward, and the choices of what to save.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: indices of state that other calls change before the backward runs.
        free: operators that cost nothing to run again.
        narrows: whether values are saved in a smaller type, where they can be.

    Raises:
        TraceError: a value is marked by `cg.recompute`, and must not be computed again, or is
            marked by `cg.keep`, too.
    """

    def __init__(
        self,
        joint: Joint,
        volatile: Collection[int] = (),
        free: Collection[fx.Node] = (),
        narrows: bool = False,
    ) -> None:
        self._narrow = narrowable(joint) if narrows else frozenset()
        self._joint = joint
        self._cut = BackwardCut(joint, volatile)
        graph = joint.graph
        kept = self._marked(KEEP) | self._marked(OFFLOAD)
        fixed = unrepeatable(joint) | kept.keys()
        inner = [n for n in graph.nodes if n.name in joint.forward and n.op == "call_function"]
        self.operators = [n for n in inner if self._is_operator(n)]
        number = {node: index for index, node in enumerate(self.operators)}
        sources = [*(n for n, _ in joint.state), *joint.inputs]
        self.values = [*sources, *(n for n in inner if self._is_value(n))]
        self._number = {node: index for index, node in enumerate(self.values)}
        makers = [self._maker(node) for node in self.values]
        free = set(free)
        self.problem = SavingProblem(
            sizes=tuple(map(self._size, self.values)),
            makers=tuple(None if m is None or m in fixed else number[m] for m in makers),
            works=tuple(0 if n in free else work_of(n) for n in self.operators),
            operands=tuple(map(self._operands, self.operators)),
            needed=tuple(self._number[n] for n in (*self._cut.saved, *self._cut.looked_up)),
            unsaved=self._unsaved(fixed, kept),
        )

    def _is_operator(self, node: fx.Node) -> bool:
        return node.target is not operator.getitem and self._cut.base(node) is None

    def _is_value(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and self._cut.base(node) is None

    def _maker(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function":
            return None
        while node.target is operator.getitem:
            (node,) = node.all_input_nodes
        return node

    def _size(self, node: fx.Node) -> int:
        if node in self._narrow:
            return narrowed_bytes(fake_of(node))
        is_state = any(node is n for n, _ in self._joint.state)
        return 0 if is_state and not self._cut.is_changed(node) else fake_of(node).nbytes

    def _operands(self, node: fx.Node) -> tuple[int, ...]:
        origins = map(self._cut.origin, node.all_input_nodes)
        return tuple(dict.fromkeys(self._number[n] for n in origins if n in self._number))

    def _marked(self, mark: str) -> dict[fx.Node, fx.Node]:
        """The operators whose results the user has marked, each with one that is marked."""
        marked = (n for n in self._joint.graph.nodes if mark_of(n) == mark)
        makers = ((self._maker(self._cut.origin(n)), n) for n in marked)
        return {maker: n for maker, n in makers if maker is not None}

    def _unsaved(
        self, fixed: Collection[fx.Node], kept: Mapping[fx.Node, fx.Node]
    ) -> frozenset[int]:
        """The values that the user wants to be computed again."""
        chosen = self._marked(RECOMPUTE)
        locations = self._joint.locations
        for node, marked in chosen.items():
            loc = locations.get(node.name) or locations.get(marked.name)
            if node in kept:
                raise TraceError(
                    f"cg.{mark_of(kept[node])} and cg.recompute are given what {_operator(node)} "
                    "computes: the one "
                    "a tensor, and the other a view of it or another result",
                    loc=loc,
                    remedy="give it to one of them; a view is in the memory of its base",
                )
            if node in fixed:
                raise TraceError(
                    f"cg.recompute is given what {_operator(node)} computes, which a backward must "
                    "not compute again: it draws random numbers, writes in place, or reads what is "
                    "written later",
                    loc=loc,
                    remedy="mark a value that is computed from it, or nothing",
                )
        return frozenset(i for i, n in enumerate(self.values) if self._maker(n) in chosen)

    @cached_property
    def frontier(self) -> Frontier:
        return Frontier(self.problem)

    @cached_property
    def tradeoff(self) -> Tradeoff:
        """The choices, as bytes against work."""
        choices = self.frontier.choices()
        return Tradeoff(
            tuple(SavingPoint(choice.size, choice.work) for choice in choices),
            sum(self.problem.works),
        )

    def nodes(self, choice: SavingChoice) -> frozenset[fx.Node]:
        """The nodes that the backward runs again for a choice: operators, and views of results."""
        again = {self.operators[index] for index in choice.again}
        return frozenset(
            node
            for node in self._joint.graph.nodes
            if node.op == "call_function"
            and node.name in self._joint.forward
            and self._maker(self._cut.origin(node)) in again
        )

    def again(self, limit: int | None) -> frozenset[fx.Node]:
        """The nodes that the backward runs again if the forward saves at most so many bytes.

        Args:
            limit: the bytes; None: any number, so that only what the user has marked runs again.
        """
        choice = self.problem.choice(()) if limit is None else self.frontier.within(limit)
        return self.nodes(choice)

    def tensors(self, choice: SavingChoice) -> list[SavedTensor]:
        """The tensors that are saved for a choice, in the order of the forward."""
        return [self._tensor(index) for index in sorted(choice.saved) if self.problem.sizes[index]]

    def _tensor(self, index: int) -> SavedTensor:
        node, maker = self.values[index], self._maker(self.values[index])
        fake, number = fake_of(node), self.problem.makers[index]
        taken = () if number is None else self.problem.operands[number]
        return SavedTensor(
            node.name,
            "input" if maker is None else _operator(maker),
            tuple(fake.shape),
            fake.dtype,
            fake.nbytes,
            0 if maker is None else work_of(maker),
            tuple(self.values[value].name for value in taken),
            number is not None,
            self._joint.locations.get(node.name),
        )


@dataclass(frozen=True)
class SavingLimits:
    """Limits of what the forwards of a step save, with the choices that are known by now.

    Attributes:
        limits: the most bytes that a forward saves, by the name of its derivative.
        narrows: whether values are saved in a smaller type, where they can be.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    narrows: bool = False
    _savings: dict[tuple[Lazy[JointNodes], frozenset[int], frozenset[fx.Node]], Savings] = field(
        default_factory=dict, compare=False, repr=False
    )

    def to(self, limits: Mapping[str, int]) -> SavingLimits:
        """Other limits for the same step."""
        return replace(self, limits=limits)

    def savings(self, joint: Joint, volatile: frozenset[int], free: frozenset[fx.Node]) -> Savings:
        """The choices of a joint graph; takes the arguments of `Savings`."""
        key = joint.nodes, volatile, free
        if key not in self._savings:
            self._savings[key] = Savings(joint, volatile, free, self.narrows)
        return self._savings[key]


def work_of(node: fx.Node) -> int:
    """The work of an operator: its operations, and `WORK_OF_BYTE` for each byte of its tensors."""
    counted = flops_of(node)
    values = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [v for v in tree_leaves([*values, node.meta.get("val")]) if torch.is_tensor(v)]
    moved = sum(tensor.nbytes for tensor in tensors)
    return (0 if counted is None else counted[1]) + WORK_OF_BYTE * moved


def unrepeatable(joint: Joint) -> set[fx.Node]:
    """The operators of a joint graph that would give something else if they ran a second time.

    They draw random numbers, have another effect, give memory that is written to, or read memory
    that is written to after them. Their results are saved, so a mask is that of the forward.
    """
    nodes: Sequence[fx.Node] = [n for n in joint.graph.nodes if n.op == "call_function"]
    last: dict[int | None, int] = {}
    for index, node in enumerate(nodes):
        for value in written_values(node.target, node.args, node.kwargs):
            if isinstance(value, fx.Node):
                last[memory_of(value)] = index
    last.pop(None, None)
    return {node for index, node in enumerate(nodes) if _differs(node, index, last)}


def _differs(node: fx.Node, index: int, last: Mapping[int | None, int]) -> bool:
    """True if a node, the `index`-th, would differ; `last` is the last write to each memory."""
    is_plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    if not is_plain or has_effect(node):
        return True
    read = {memory_of(source) for source in node.all_input_nodes}
    outputs = {
        storage_key(value) for value in tree_leaves(node.meta.get("val")) if torch.is_tensor(value)
    }
    late = any(last.get(key, -1) > index for key in read)
    return late or any(key in last for key in outputs - read)


def _operator(node: fx.Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else node.name
