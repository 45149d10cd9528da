"""Declare functions with the shapes of the pieces that ranks hold."""

from __future__ import annotations

from dataclasses import replace

from ...ir.attributes import Symbol
from ...ir.ops import Call
from ...ir.ops.module import Function, Module
from ...ir.types import Place, TensorType, ValueType


class LocalFunctions:
    """Makes the functions that ranks call in place of functions with laid-out inputs or outputs.

    There is one declaration for each signature that a function has at some rank. The first one
    keeps the name. The others have names of their own, and refer to the first one's body. Functions
    of actors on several ranks list these ranks.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._laid_out = {
            name: function
            for name, function in module.functions.items()
            if any(map(_is_laid_out, (*function.inputs, *function.outputs)))
        }
        # A function, and the symbol that all ranks with its signature have.
        self._declarations: dict[
            str, dict[tuple[tuple[ValueType, ...], ...], tuple[Function, Symbol]]
        ] = {}
        self._symbols: dict[tuple[str, Place], dict[int, Symbol]] = {}
        self._placed: dict[tuple[ValueType, Place], ValueType] = {}
        self._latest: tuple[Call | None, dict[int, Symbol]] = None, {}
        self._names = set(module.functions)
        self._ranks: dict[str, tuple[int, ...]] = {}

    @property
    def are_needed(self) -> bool:
        """True if any function has laid-out inputs or outputs."""
        return bool(self._laid_out)

    def of(self, op: Call, rank: int) -> Symbol:
        """The function that a rank calls for a call of the program over all ranks."""
        function = self._laid_out.get(op.fn.name)
        if function is None:
            return op.fn
        assert op.place is not None, "before SCHEDULED a call has a place"
        latest, symbols = self._latest
        if latest is not op:  # each call is asked for at all of its ranks in turn
            symbols = self._symbols.setdefault((function.name, op.place), {})
            self._latest = op, symbols
        symbol = symbols.get(rank)
        if symbol is None:
            symbol = symbols[rank] = self._declared(function, op.place, rank)
        return symbol

    def note(self, op: Call) -> None:
        """Note a call that runs on several ranks; its functions are declared in this order."""
        function = self._module.functions[op.fn.name]
        if op.place is None:
            return
        if function.actor is not None:
            self._ranks[function.name] = op.place.ranks
        if function.name in self._laid_out and (function.name, op.place) not in self._symbols:
            for rank in op.place.ranks:
                self.of(op, rank)

    def finish(self) -> None:
        """Replace the declarations of the module by those at local shapes."""
        for name, ranks in self._ranks.items():
            if name not in self._laid_out:
                declared = self._module.functions[name]
                self._module.functions[name] = replace(declared, ranks=ranks)
        if not self._laid_out:
            return
        functions = dict(self._module.functions)
        self._module.functions.clear()
        for name, function in functions.items():
            if name in self._laid_out:
                declarations = self._declarations.get(name, {}).values()
                self._module.functions.update(
                    (declaration.name, declaration) for declaration, _ in declarations
                )
            else:
                self._module.functions[name] = function
        for name, vjp in list(self._module.vjps.items()):
            if not self._laid_out.keys().isdisjoint(vjp.functions):
                del self._module.vjps[name]  # its functions have other shapes at each rank

    def _declared(self, function: Function, place: Place, rank: int) -> Symbol:
        inputs = tuple([self._local(type_, place, rank) for type_ in function.inputs])
        outputs = tuple([self._local(type_, place, rank) for type_ in function.outputs])
        known = self._declarations.setdefault(function.name, {})
        if (inputs, outputs) not in known:
            ranks = self._ranks.get(function.name, ())
            declaration = replace(function, inputs=inputs, outputs=outputs, ranks=ranks)
            if known:
                declaration = replace(
                    declaration, name=self._fresh(function.name), body=function.body_name
                )
            known[inputs, outputs] = declaration, Symbol(declaration.name)
        return known[inputs, outputs][1]

    def _local(self, type_: ValueType, place: Place, rank: int) -> ValueType:
        """The local form of a signature's type, at a rank of a call's place."""
        if not isinstance(type_, TensorType) or type_.layout is None:
            return type_
        placed = self._placed.get((type_, place))
        if placed is None:
            placed = self._placed[type_, place] = replace(type_, place=place)
        assert isinstance(placed, TensorType), "a type stays a tensor's"
        return placed.local(rank)

    def _fresh(self, name: str) -> str:
        number = 1
        while f"{name}.{number}" in self._names:
            number += 1
        self._names.add(f"{name}.{number}")
        return f"{name}.{number}"


def _is_laid_out(type_: ValueType) -> bool:
    return isinstance(type_, TensorType) and type_.layout is not None
