"""Collect the cotangents of values and sum them, rank by rank first."""

from __future__ import annotations

from ...ir.attributes import Action, Symbol
from ...ir.ops import AllReduce, Call, Constant, Op, Value, builtins
from ...ir.ops.module import Module
from ...ir.ops.names import Names
from ...ir.text.diagnostics import error
from ...ir.types import Place, TensorType, Type, relocate


class Cotangents:
    """The cotangents that have arrived for each value, and the ops that sum them.

    Attributes:
        ops: the ops made so far, in order.
    """

    def __init__(self, module: Module, names: Names) -> None:
        self.ops: list[Op] = []
        self._module = module
        self._names = names
        self._arrived: dict[Value, list[Value]] = {}

    def new(self, primal: Value, type_: Type) -> Value:
        """A new value of a type, named as a gradient of `primal`."""
        return Value(self._names.fresh(f"{primal.name}.grad"), type_)

    def fill(self, primal: Value, number: float, place: Place | None, like: Op) -> Value:
        """A new constant of the type of `primal`, at `place`; `like` gives microbatch and line."""
        value = self.new(primal, relocate(primal.type, place))
        self.ops.append(Constant((), (value,), fill=number, loc=like.loc, mb=like.mb))
        return value

    def add(self, primal: Value, cotangent: Value) -> None:
        """Note one more cotangent of `primal`."""
        self._arrived.setdefault(primal, []).append(cotangent)

    def has(self, primal: Value) -> bool:
        """True if any cotangent of `primal` has arrived."""
        return primal in self._arrived

    def total(self, primal: Value, maker: Op) -> Value:
        """The sum of the cotangents that have arrived for `primal`, which `maker` made.

        Cotangents that were made at one place are summed there, in the order of arrival. If that
        gives a single sum, it stays where it is. Several sums are added at the primal's place: by
        an `all_reduce` if there is one on each of the primal's ranks, and otherwise by calls.
        """
        by_place: dict[Place | None, Value] = {}
        for cotangent in self._arrived.pop(primal):
            place = cotangent.type.place
            if place in by_place:
                by_place[place] = self._sum(primal, by_place[place], cotangent, place, maker)
            else:
                by_place[place] = cotangent
        first, *rest = by_place.values()
        if not rest:
            return first
        home = primal.type.place
        if home is not None and by_place.keys() == {Place.of(rank) for rank in home.ranks}:
            parts = tuple(by_place[Place.of(rank)] for rank in home.ranks)
            return self._all_reduce(primal, parts, home, maker)
        for addend in rest:
            first = self._sum(primal, first, addend, home, maker)
        return first

    def _sum(self, primal: Value, a: Value, b: Value, place: Place | None, maker: Op) -> Value:
        type_ = primal.type
        if not isinstance(type_, TensorType):
            raise error(
                f"value '{primal.name}' is used twice on the way to a loss, "
                "but only the gradients of tensors can be added",
                op=maker,
                program=self._module.program,
                value=primal,
                help="return a tensor from this call, not a Python object",
            )
        function = builtins.add(self._module, type_)
        result = self.new(primal, relocate(type_, place))
        forward = maker.task if place == maker.place else None
        self.ops.append(
            Call(
                (a, b),
                (result,),
                fn=Symbol(function.name),
                loc=maker.loc,
                mb=maker.mb,
                task=forward and forward.beside(Action.BACKWARD),
            )
        )
        return result

    def _all_reduce(self, primal: Value, parts: tuple[Value, ...], home: Place, maker: Op) -> Value:
        result = self.new(primal, relocate(primal.type, home))
        self.ops.append(AllReduce(parts, (result,), group=home, loc=maker.loc, mb=maker.mb))
        return result
