"""Check that run-time values have the types that the program declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.ops.module import Function, Program
from ...ir.types import TensorType, Type
from ..base import Body
from ..dtypes import TORCH_DTYPES, describe
from ..errors import InputError, ResultError

Expected = tuple[int, torch.dtype, torch.Size]


def expected_tensors(types: Sequence[Type]) -> tuple[Expected, ...]:
    """Position, dtype and shape of each tensor among `types`."""
    return tuple(
        (index, TORCH_DTYPES[type_.dtype], torch.Size(type_.shape))
        for index, type_ in enumerate(types)
        if isinstance(type_, TensorType)
    )


def misfit(values: Sequence[Any], expected: Sequence[Expected]) -> int | None:
    """Position of the first value that is not the tensor expected there."""
    for index, dtype, shape in expected:
        value = values[index]
        if not isinstance(value, torch.Tensor) or value.dtype is not dtype or value.shape != shape:
            return index
    return None


class InputCheck:
    """Checks the inputs of an execution against a program's parameters."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._count = len(program.params)
        self._tensors = expected_tensors([value.type for value in program.params])

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Check that the inputs fit.

        Raises:
            InputError: there are too many or too few, or a tensor has another dtype or shape.
        """
        if len(inputs) != self._count:
            raise InputError(f"program @{self._name} takes {self._count} inputs, got {len(inputs)}")
        index = misfit(inputs, self._tensors)
        if index is not None:
            value = self._program.params[index]
            raise InputError(
                f"input %{value.name} of program @{self._name} must be {value.type}, "
                f"got {describe(inputs[index])}. A compiled step takes only what it was "
                "lowered for; lower it again for inputs of another dtype or shape"
            )

    @property
    def _name(self) -> str:
        program = self._program
        return program.name if program.rank is None else str(program.rank)


def checked(body: Body, function: Function) -> Body:
    """Make `body` check its results against the declaration of `function`.

    The body raises `ResultError` where it would return a wrong number of values, or a tensor of
    another dtype or shape.
    """
    count = len(function.outputs)
    tensors = expected_tensors(function.outputs)
    if not tensors:

        def count_only(*inputs: Any) -> Sequence[Any]:
            outputs = body(*inputs)
            if type(outputs) is tuple and len(outputs) == count:
                return outputs
            if not isinstance(outputs, (tuple, list)) or len(outputs) != count:
                raise _wrong_count(function, outputs)
            return outputs

        return count_only

    def run(*inputs: Any) -> Sequence[Any]:
        outputs = body(*inputs)
        if not isinstance(outputs, (tuple, list)) or len(outputs) != count:
            raise _wrong_count(function, outputs)
        index = misfit(outputs, tensors)
        if index is not None:
            raise ResultError(
                f"{_described(function)} returned {describe(outputs[index])} as output {index}, "
                f"expected {function.outputs[index]}. Types are fixed when a step is compiled: "
                "return the same dtype and shape on every call"
            )
        return outputs

    return run


def _wrong_count(function: Function, outputs: object) -> ResultError:
    got = f"{len(outputs)} values" if isinstance(outputs, (tuple, list)) else describe(outputs)
    return ResultError(
        f"{_described(function)} returned {got}, expected {len(function.outputs)} values. The "
        "structure of a result is fixed when a step is compiled: return the same on every call"
    )


def _described(function: Function) -> str:
    where = f" ({function.loc})" if function.loc is not None else ""
    return f"{function.name}{where}"
