"""What traces of one step share: graphs of calls, and what these are cut into.

A memory limit has a step traced again and again, and nothing but the limits of its derivatives
differs. So the Python of a method need not run in each of these traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..graph.prepared import PreparedGraph
from ..lazy import Lazy
from ..method.joint import Wanted
from ..method.joint_graph import Joint, JointNodes
from ..torch_settings import settings_now
from ..values.interface import MethodTarget, Target, TracedCall
from ..values.specs import Static, static_key
from .laid_out_pieces import LaidOutPieces
from .rank_functions import GraphPieces

TracedGraph: TypeAlias = tuple[TracedCall, Joint]
"""A call on the state of its actor, and its joint graph."""


@dataclass(eq=False)
class StepPieces:
    """Caches the graphs of a step's calls, and their pieces.

    The actors must not change while traces share it.

    Attributes:
        calls: the calls that were traced, by `call_key`; None for one that works on gradients.
        whole: of calls of which each rank computes all.
        laid_out: of calls that ranks compute in pieces.
    """

    calls: dict[Hashable, TracedGraph | None] = field(default_factory=dict)
    whole: GraphPieces = field(default_factory=GraphPieces)
    laid_out: LaidOutPieces = field(default_factory=LaidOutPieces)
    _prepared: dict[tuple[Lazy[JointNodes], tuple[int, ...]], PreparedGraph | None] = field(
        default_factory=dict
    )

    def prepared(self, joint: Joint, weights: Sequence[int]) -> PreparedGraph | None:
        """The graph that takes what is prepared of weights; the arguments of `PreparedGraph.of`."""
        key = joint.nodes, tuple(weights)
        if key not in self._prepared:
            self._prepared[key] = PreparedGraph.of(joint, weights)
        return self._prepared[key]


def call_key(target: Target, call: TracedCall, name: str, wanted: Wanted | None) -> Hashable:
    """The key of a call among those of one step: equal ones have the same graph.

    Args:
        target: what is called.
        call: the call.
        name: the name of the function that it becomes in the module.
        wanted: the derivative that is traced as well, if any.
    """
    called = target.callable
    if isinstance(target, MethodTarget):  # bound methods of equal instances may be equal
        called = id(target.instance), target.function
    leaves = tuple(
        static_key(leaf.value) if isinstance(leaf, Static) else leaf
        for leaf in call.signature.leaves
    )
    settings = torch.is_grad_enabled(), settings_now()
    return name, called, call.shown, leaves, call.signature.spec, call.loc, wanted, settings
