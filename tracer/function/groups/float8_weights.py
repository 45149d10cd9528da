"""Functions that prepare an actor's weights for float8: their greatest magnitudes, and their casts.

The magnitudes of all weights with one scale are a vector, so that one reduction over the ranks
serves all of them. A stored weight is scaled and cast where it rests, and gathered as float8.
torchao does the same for FSDP (`torchao/float8/fsdp_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ....ir.attributes import Effect, ReduceOp
from ....ir.layout import WHOLE, Layout
from ....ir.location import Location
from ....ir.ops.module import Function
from ....ir.types import DType, TensorType
from ...graph.autodiff.subgraphs import Subgraph
from ...graph.codegen.codegen import make_body, source_of
from ...method.float8.formula import quantised, scales_of
from ...values.actor_state import StateTensor
from ...values.float8_layers import Float8Recipe, choose
from ...values.group import GroupActor
from ...values.interface import Body, RankBodies, TracedPart
from ...values.specs import ir_dtype
from .stored import FlatParameter, ParameterGather, filled_up, whole_of

WEIGHT = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8Weights:
    """The weights of an actor on a mesh that have one scale each.

    Attributes:
        group: the actor.
        loc: the user's line that calls the actor.
    """

    group: GroupActor
    loc: Location | None = None

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Their paths, in the order of the vector of magnitudes."""
        if not self.group.plan.float8 or not self.group.instances:
            return ()
        tensors = self.group.state(self.group.first).tensors
        recipes = choose(self.group.plan.float8, tensors).recipes
        return tuple(p for p, recipe in recipes.items() if recipe is Float8Recipe.TENSORWISE)

    @cached_property
    def _tensors(self) -> dict[int, dict[str, StateTensor]]:
        """The weights of each rank that this process plays, by rank and path."""
        return {
            rank: {t.path: t for t in self.group.state(rank).tensors if t.path in self.paths}
            for rank in self.group.instances
        }

    @property
    def reduced(self) -> TensorType:
        """The type of the vector of magnitudes, on each rank."""
        return TensorType(DType.F32, (len(self.paths),), None, None)

    @property
    def terms(self) -> TensorType:
        """The type of the vector of magnitudes of each rank's pieces."""
        layouts = self.group.layouts
        cutting = {axis for path in self.paths if path in layouts for axis in layouts[path].axes}
        axes = tuple(axis for axis, _ in self.group.mesh.grid if axis in cutting)
        layout = Layout.of((WHOLE,), axes, ReduceOp.MAX)
        return TensorType(DType.F32, (len(self.paths),), None, layout)

    def maxima(self) -> TracedPart:
        """The function that gives the magnitudes of each rank's pieces."""
        function = Function(
            f"{self.group.name}.float8.maxima",
            (),
            (self.terms,),
            effect=Effect.READ,
            actor=self.group.name,
            loc=self.loc,
            once=True,
        )
        bodies = {
            rank: _body(function, [own[path] for path in self.paths], (), _magnitudes)
            for rank, own in self._tensors.items()
        }
        return TracedPart(function, RankBodies.of(bodies))

    def gathers(self, path: str) -> ParameterGather:
        """The gather of a stored weight as float8; what reads the piece takes the magnitudes."""
        logical = self.group.logical[path]
        flat = FlatParameter.of(logical, self.group.mesh)
        dtype = ir_dtype(WEIGHT)
        rest, full = flat.type(dtype, True), flat.type(dtype, False)
        name = f"{self.group.name}.{path}.float8"
        read = Function(
            f"{name}.rest",
            (self.reduced,),
            (rest,),
            effect=Effect.READ,
            actor=self.group.name,
            loc=self.loc,
            parameter=path,
        )
        number = self.paths.index(path)

        def cast(weight: Tensor, maxima: Tensor) -> tuple[Tensor, ...]:
            scale = scales_of(maxima[number], WEIGHT)
            return (filled_up(quantised(weight.detach(), scale, WEIGHT), flat.numel),)

        bodies = {
            rank: _body(read, [own[path]], (self.reduced,), cast)
            for rank, own in self._tensors.items()
        }
        used = TensorType(dtype, logical.shape, None, logical.used)
        making = whole_of(name, self.group, flat, full, used, path, self.loc)
        return ParameterGather(TracedPart(read, RankBodies.of(bodies)), making)


def _magnitudes(*weights: Tensor) -> tuple[Tensor, ...]:
    """The greatest magnitude of each weight; 0 of an empty piece."""
    return (
        torch.stack(
            [
                w.detach().abs().amax().float() if w.numel() else w.new_zeros((), dtype=torch.float32)
                for w in weights
            ]
        ),
    )


def _body(
    function: Function,
    reads: list[StateTensor],
    takes: tuple[TensorType, ...],
    compute: Callable[..., tuple[Tensor, ...]],
) -> Body:
    """A body that computes from tensors of the state, as those of traced methods do."""
    pieces = [tensor.tensor.detach() for tensor in reads]
    examples = [
        torch.empty(each.shape, dtype=torch.float32, device=pieces[0].device) for each in takes
    ]
    traced = make_fx(compute, tracing_mode="fake")(*pieces, *examples)
    piece = Subgraph(
        graph=traced.graph,
        owner=traced,
        reads=tuple(reads),
        takes=takes,
        dense=(True,) * len(takes),
        gives=function.outputs,
        rebinds=(),
        gradients=(),
        aliases=(),
        draws=False,
        locations={},
    )
    return make_body(piece, function.name, source_of(piece))
