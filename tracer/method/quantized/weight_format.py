"""The formats of quantized weights, as one description.

A weight is a matrix of levels: small floats, or integers of a few bits, which may be places in a
table of numbers. A level, less a zero point if the format has one, times a scale, is a number.
Neighbours share a scale. The module does not import torch, since the front of a server checks
formats without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

WORD = 32
"""Bits of a word that integers are packed into."""
BYTE = 8
"""Bits of a word of some formats, whose integers have 4 bits."""


@dataclass(frozen=True)
class Packing:
    """Integers of a few bits in words of 32 bits, or in bytes.

    Attributes:
        bits: of an integer; it divides those of a word.
        dimension: of the stored tensor, along which words stand for several integers.
        order: which integer of a word, counted from its lowest bits, stands for which of the
            neighbours, by the neighbour.
    """

    bits: int
    dimension: int
    order: tuple[int, ...]

    @staticmethod
    def in_order(bits: int, dimension: int) -> Packing:
        """The first of the neighbours has the lowest bits."""
        return Packing(bits, dimension, tuple(range(WORD // bits)))

    @property
    def is_of_bytes(self) -> bool:
        """Whether words are bytes, and not of 32 bits."""
        return self.bits * len(self.order) == BYTE


@dataclass(frozen=True)
class ActivationFormat:
    """How a layer's input is quantized, before its product.

    Attributes:
        is_float: to float8_e4m3fn; else to integers of 8 bits, around 0.
        inputs_per_scale: neighbours of a token that share a scale; 0: all of a token.
        scale: the tensor with one scale for all inputs; empty: scales are those of the largest
            numbers.
        is_power: whether scales are rounded up to powers of two.
    """

    is_float: bool
    inputs_per_scale: int = 0
    scale: str = ""
    is_power: bool = False

    def __str__(self) -> str:
        kind = "float8" if self.is_float else "int8"
        if self.scale:
            return f"inputs in {kind} by a stored scale"
        return f"inputs in {kind} by {self.inputs_per_scale or 'token'}"


@dataclass(frozen=True)
class TensorDims:
    """The dimensions of a stored tensor that are a layer's outputs and inputs.

    Attributes:
        outputs, inputs: None if the tensor has none such, or one entry for all of them.
        output_unit, input_unit: how many outputs, or inputs, an entry stands for.
    """

    outputs: int | None = None
    inputs: int | None = None
    output_unit: int = 1
    input_unit: int = 1


@dataclass(frozen=True)
class NestedScale:
    """Scales that are stored as places in a table, in runs that share a scale of their own.

    A scale is the number at its place times the scale of its run, and `offset` more. Runs are of
    neighbours in the order in which a matrix of scales lies in memory.

    Attributes:
        table: the tensor with the numbers.
        scale: the tensor with the scales of runs.
        run: how many neighbours share one.
        offset: of all scales of a layer.
    """

    table: str
    scale: str
    run: int
    offset: float = 0.0


@dataclass(frozen=True)
class WeightFormat:
    """How the tensors of a quantized linear layer stand for its weight.

    Attributes:
        name: as messages have it.
        weight, scale: the names of the tensors with levels and scales.
        outputs_per_scale, inputs_per_scale: neighbours that share a scale; 0: all.
        packing: of the levels; None: each is an element.
        zero: the tensor with zero points, which are shared as scales are; empty: there is none.
        zero_packing: of them.
        offset: what is subtracted from a level, beside its zero point.
        zero_wraps: whether a zero point, with the offset, has no more bits than it is stored in.
        index: the tensor with the number of the scale of each input; empty: there is none.
        by_index: whether scales are taken by it; else its numbers are those of neighbours.
        is_turned: whether tensors are [inputs, outputs], and not [outputs, inputs].
        kept: tensors that are stored besides, and stay as they are.
        activations: how inputs are quantized; None: they are not.
        table: the tensor with the numbers whose places levels are; empty: levels are numbers.
        numbers: these numbers, where a format has the same for all layers, and stores none.
        scale_bias: what is subtracted from a stored scale to get the exponent of a power of two,
            which the scale is; None: scales are stored as numbers.
        steps: what a stored scale is divided by.
        nested: how scales are quantized in turn; None: they are not.
        has_own_shapes: whether a folder has levels and scales in other shapes than matrices.
        description: the tensor with JSON about the layer; empty: there is none.
    """

    name: str
    weight: str
    scale: str
    outputs_per_scale: int
    inputs_per_scale: int
    packing: Packing | None = None
    zero: str = ""
    zero_packing: Packing | None = None
    offset: int = 0
    zero_wraps: bool = False
    index: str = ""
    by_index: bool = False
    is_turned: bool = False
    kept: tuple[str, ...] = ()
    activations: ActivationFormat | None = None
    table: str = ""
    numbers: tuple[float, ...] = ()
    scale_bias: int | None = None
    steps: float = 1.0
    nested: NestedScale | None = None
    has_own_shapes: bool = False
    description: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a layer's tensors."""
        static = self.activations.scale if self.activations else ""
        nested = (self.nested.table, self.nested.scale) if self.nested else ()
        names = (self.weight, self.scale, self.zero, self.index, self.table, *nested)
        return tuple(dict.fromkeys(name for name in (*names, *self.kept, static) if name))

    @property
    def is_affine(self) -> bool:
        """Whether a number is a stored scale times a level less its zero point."""
        scales = self.nested is None and self.scale_bias is None and self.steps == 1
        return scales and not (self.table or self.numbers)

    @property
    def as_text(self) -> str:
        """All of it as a string, which an operator of torch can take."""
        return json.dumps(asdict(self))

    @staticmethod
    @cache
    def from_text(text: str) -> WeightFormat:
        """The format that `as_text` has written."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("packing", "zero_packing"):
            if fields[name] is not None:
                fields[name] = Packing(**fields[name] | {"order": tuple(fields[name]["order"])})
        for name, kind in (("activations", ActivationFormat), ("nested", NestedScale)):
            fields[name] = None if fields[name] is None else kind(**fields[name])
        lists = {name: tuple(fields[name]) for name in ("kept", "numbers")}
        return WeightFormat(**fields | lists)

    def dims(self, name: str, shape: tuple[int, ...]) -> TensorDims:
        """The dimensions of a stored tensor.

        Args:
            name: of the tensor.
            shape: of the tensor.
        """
        if name == self.index:
            return TensorDims(inputs=0)
        outputs, inputs = self.turned(0, 1)
        if name == self.weight:
            return self._of_matrix(outputs, inputs, 1, 1, self.packing)
        if name not in (self.scale, self.zero) or math.prod(shape) == 1:
            return TensorDims()
        packing = self.zero_packing if name == self.zero else None
        has_outputs = self.outputs_per_scale and (shape[outputs] > 1 or packing is not None)
        has_inputs = self.inputs_per_scale and not self.by_index and len(shape) > 1
        return self._of_matrix(
            outputs if has_outputs else None,
            inputs if has_inputs and shape[inputs] > 1 else None,
            self.outputs_per_scale,
            self.inputs_per_scale,
            packing,
        )

    def shape(self, name: str, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...] | None:
        """The shapes that a stored tensor of a layer of some sizes may have; None: any."""
        if name == self.index:
            return ((inputs,),)
        if name == self.weight:
            return (self._packed(self.turned(outputs, inputs), self.packing),)
        if name == self.table:
            return ((1 << self.packing.bits,),) if self.packing else None
        if name not in (self.scale, self.zero):
            return None
        rows = -(-outputs // self.outputs_per_scale) if self.outputs_per_scale else 1
        columns = -(-inputs // self.inputs_per_scale) if self.inputs_per_scale else 1
        if name == self.zero and self.zero_packing is not None:
            return (self._packed(self.turned(rows, columns), self.zero_packing),)
        shapes: tuple[tuple[int, ...], ...] = (self.turned(rows, columns),)
        if columns == 1 and not self.is_turned:
            shapes += ((rows,),)
        return (*shapes, ()) if rows == columns == 1 else shapes

    def sizes(self, levels: tuple[int, ...]) -> tuple[int, int]:
        """The outputs and inputs of a layer whose words are full, by the shape of its levels."""
        shape = list(levels)
        if self.packing is not None:
            shape[self.packing.dimension] *= len(self.packing.order)
        return self.turned(*shape)

    def units(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """The outputs, and the inputs, that belong together in some tensor of a layer."""
        dims = [self.dims(name, shape) for name, shape in shapes.items()]
        outputs = math.lcm(*(each.output_unit for each in dims))
        return outputs, math.lcm(*(each.input_unit for each in dims))

    def _of_matrix(
        self,
        outputs: int | None,
        inputs: int | None,
        output_unit: int,
        input_unit: int,
        packing: Packing | None,
    ) -> TensorDims:
        if packing is not None and packing.dimension == outputs:
            output_unit *= len(packing.order)
        if packing is not None and packing.dimension == inputs:
            input_unit *= len(packing.order)
        return TensorDims(
            outputs,
            inputs,
            1 if outputs is None else output_unit,
            1 if inputs is None else input_unit,
        )

    @staticmethod
    def _packed(shape: tuple[int, int], packing: Packing | None) -> tuple[int, ...]:
        if packing is None:
            return shape
        words = list(shape)
        words[packing.dimension] = -(-words[packing.dimension] // len(packing.order))
        return tuple(words)

    def turned(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Two numbers in the order in which tensors have outputs and inputs."""
        return (inputs, outputs) if self.is_turned else (outputs, inputs)
