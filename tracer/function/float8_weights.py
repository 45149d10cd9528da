"""Functions that prepare an actor's weights for float8: their scales, and their casts.

The greatest magnitudes of all weights with one scale are a vector, so that one reduction over the
ranks serves all of them, and so are their scales. Each weight is cast once in a step. A stored
weight is cast where it rests, and gathered as float8. torchao does the same for FSDP
(`torchao/float8/fsdp_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ...ir.attributes import Effect, ReduceOp
from ...ir.layout import WHOLE, Layout
from ...ir.location import Location
from ...ir.ops.module import Function
from ...ir.types import DType, TensorType
from ..graph.autodiff.subgraphs import PieceNodes, Subgraph
from ..graph.codegen.bodies import wrapped_body
from ..graph.codegen.codegen import make_body, sources_of
from ..graph.codegen.generated_source import BodySources
from ..lazy import Lazy
from ..method.float8.formula import quantised, scales_of
from ..values.actor_state import StateTensor
from ..values.float8_layers import Float8Recipe, Float8Use
from ..values.group import GroupActor
from ..values.interface import Body, RankBodies, TracedPart
from ..values.specs import ir_dtype
from .groups.stored import FlatParameter, ParameterGather, filled_up, whole_of

WEIGHT = torch.float8_e4m3fn


def with_one_scale(use: Float8Use | None, tensors: Sequence[StateTensor]) -> tuple[int, ...]:
    """The indices of the weights, among an actor's tensors, that have one scale each."""
    recipes = {} if use is None else use.recipes(tensors)
    return tuple(
        index
        for index, tensor in enumerate(tensors)
        if recipes.get(tensor.path) is Float8Recipe.TENSORWISE
    )


class PreparingGraphs:
    """The graphs that prepare weights, each with the source of its bodies.

    Weights of equal sizes share them, and so do all calls of a step.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Lazy[PieceNodes], BodySources]] = {}

    def body(
        self,
        function: Function,
        reads: tuple[StateTensor, ...],
        takes: tuple[TensorType, ...],
        compute: Callable[..., tuple[Tensor, ...]],
        kind: object,
        device: torch.device,
    ) -> Body:
        """A body that computes from tensors of the state, as those of traced methods do.

        Args:
            function: the function.
            reads: the tensors of the state.
            takes: the types of what the graph takes besides.
            compute: takes both, and gives the results.
            kind: equal for each `compute` that does the same.
            device: the device of what the graph takes besides.
        """
        pieces = [tensor.tensor.detach() for tensor in reads]
        layouts = tuple((x.dtype, x.device, tuple(x.shape), x.stride()) for x in pieces)
        key = kind, layouts, takes, device
        nodes, sources = self._known.get(key, (None, None))
        if nodes is None:
            examples = [
                torch.empty(type_.shape, dtype=torch.float32, device=device) for type_ in takes
            ]
            traced = make_fx(compute, tracing_mode="fake")(*pieces, *examples)
            nodes = Lazy.known(PieceNodes(traced.graph, traced, {}))
        piece = Subgraph(
            nodes=nodes,
            reads=reads,
            takes=takes,
            dense=(True,) * len(takes),
            gives=function.outputs,
            rebinds=(),
            gradients=(),
            aliases=(),
            draws=False,
            checks=False,
        )
        if sources is None:
            sources = sources_of(piece)
            self._known[key] = nodes, sources
        return make_body(piece, function.name, sources)


@dataclass(frozen=True)
class Float8Weights:
    """The weights of an actor that have one scale each.

    Attributes:
        actor: the name of the actor.
        paths: their paths, in the order of the vector of magnitudes.
        tensors: all tensors of each rank that this process plays.
        group: the actor, if it is on a mesh.
        loc: the user's line that calls the actor.
        graphs: those of the step.
    """

    actor: str
    paths: tuple[str, ...]
    tensors: Mapping[int, Sequence[StateTensor]]
    group: GroupActor | None
    loc: Location | None
    graphs: PreparingGraphs

    @property
    def reduced(self) -> TensorType:
        """The type of the vector of magnitudes, and of the vector of scales."""
        return TensorType(DType.F32, (len(self.paths),))

    @property
    def terms(self) -> TensorType:
        """The type of the vectors of magnitudes of each rank's pieces."""
        if self.group is None:
            return self.reduced
        layouts = self.group.layouts
        cutting = {axis for path in self.paths if path in layouts for axis in layouts[path].axes}
        axes = tuple(axis for axis, _ in self.group.mesh.grid if axis in cutting)
        return TensorType(
            DType.F32, (len(self.paths),), None, Layout.of((WHOLE,), axes, ReduceOp.MAX)
        )

    def maxima(self) -> TracedPart:
        """The function that gives the magnitudes of each rank's pieces."""
        function = Function(
            f"{self.actor}.float8.maxima",
            (),
            (self.terms,),
            effect=Effect.READ,
            actor=self.actor,
            loc=self.loc,
            once=True,
        )
        held = [self._held(path) for path in self.paths]
        bodies = {}
        for rank, device in self._devices().items():
            reads = tuple(tensor[rank] for tensor in held)
            compute = _magnitudes, "magnitudes"
            bodies[rank] = self.graphs.body(function, reads, (), *compute, device)
        return _part(function, bodies)

    def scales(self) -> TracedPart:
        """The function that gives the scales for the magnitudes of whole weights."""
        function = Function(
            f"{self.actor}.float8.scales",
            (self.reduced,),
            (self.reduced,),
            actor=self.actor,
            loc=self.loc,
            once=True,
        )
        bodies = {
            rank: self.graphs.body(function, (), (self.reduced,), _scales, "scales", device)
            for rank, device in self._devices().items()
        }
        return _part(function, bodies)

    def casts(self, path: str) -> TracedPart:
        """The function that casts a weight, or each rank's piece of it; it takes the scales."""
        logical = None if self.group is None else self.group.logical[path]
        (tensor, *_) = self._held(path).values()
        shape, layout = tensor.shape, None if logical is None else logical.layout
        function = Function(
            f"{self.actor}.{path}.float8",
            (self.reduced,),
            (TensorType(ir_dtype(WEIGHT), shape, None, layout),),
            effect=Effect.READ,
            actor=self.actor,
            loc=self.loc,
            once=True,
        )
        return self._cast(function, path, None)

    def gathers(self, path: str) -> ParameterGather:
        """The gather of a stored weight as float8; what reads the piece takes the scales."""
        assert self.group is not None, "weights are stored on a mesh"
        logical = self.group.logical[path]
        flat = FlatParameter.of(logical, self.group.mesh)
        dtype = ir_dtype(WEIGHT)
        rest, full = flat.type(dtype, True), flat.type(dtype, False)
        name = f"{self.actor}.{path}.float8"
        read = Function(
            f"{name}.rest",
            (self.reduced,),
            (rest,),
            effect=Effect.READ,
            actor=self.actor,
            loc=self.loc,
            parameter=path,
        )
        used = TensorType(dtype, logical.shape, None, logical.used)
        making = whole_of(name, self.group, flat, full, used, path, self.loc)
        piece = self._cast(read, path, flat.numel)
        return ParameterGather(piece, making)

    def _held(self, path: str) -> dict[int, StateTensor]:
        return {
            rank: next(tensor for tensor in tensors if tensor.path == path)
            for rank, tensors in self.tensors.items()
        }

    def _devices(self) -> dict[int, torch.device]:
        """The device of each rank that this process plays."""
        first = self._held(self.paths[0])
        return {rank: tensor.tensor.device for rank, tensor in first.items()}

    def _cast(self, function: Function, path: str, numel: int | None) -> TracedPart:
        """A function that casts a rank's piece of a weight.

        Its graph takes one scale, so that weights of equal sizes share a graph.

        Args:
            function: the function.
            path: of the weight.
            numel: the elements of a flat cast, filled up with zeros; None: it is not flat.
        """
        number = self.paths.index(path)

        def cast(weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            result = quantised(weight, scale, WEIGHT)
            if numel is None:
                return (result,)
            is_full = result.numel() == numel
            return (result.reshape(-1) if is_full else filled_up(result, numel),)

        def chosen(body: Body) -> Body:
            return lambda scales: body(scales[number])

        scalar = TensorType(DType.F32, ())
        devices, kind, bodies = self._devices(), ("cast", numel), {}
        for rank, tensor in self._held(path).items():
            body = self.graphs.body(function, (tensor,), (scalar,), cast, kind, devices[rank])
            bodies[rank] = wrapped_body(body, chosen)
        return _part(function, bodies)


def _part(function: Function, bodies: Mapping[int, Body]) -> TracedPart:
    return TracedPart(function, RankBodies.of(bodies) if bodies else None)


def _scales(maxima: Tensor) -> tuple[Tensor, ...]:
    return (scales_of(maxima, WEIGHT),)


def _magnitudes(*weights: Tensor) -> tuple[Tensor, ...]:
    """The greatest magnitude of each weight; 0 of an empty piece."""
    maxima = [w.abs().amax().float() if w.numel() else w.float().sum() for w in weights]
    return (torch.stack(maxima),)
