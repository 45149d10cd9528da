"""What conversions make of tensors without numbers, against what they make of tensors with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.layout import Region, merge, whole
from cg.launch.conversions.composition import Composition
from cg.launch.conversions.symbolic_tensor import SymbolicTensor

from ..sampling import examples

Tensors = dict[str, torch.Tensor]


def splits_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes with the same elements: one dimension is cut in two, or two that follow are joined."""
    shapes = [
        (*shape[:d], n, shape[d] // n, *shape[d + 1 :])
        for d, n in itertools.product(range(len(shape)), (1, 2, 3, 4))
        if shape[d] % n == 0
    ]
    shapes += [
        (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]) for d in range(len(shape) - 1)
    ]
    return [new for new in shapes if len(new) < 6] or [shape]


def apply(draw: st.DrawFn, tensors: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Apply one operation of conversions to tensors without numbers and to the real ones."""
    symbolic, real = tensors
    shape = tuple(real.shape)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    other = draw(st.integers(0, len(shape) - 1))
    new = draw(st.sampled_from(splits_of(shape)))
    first = draw(st.integers(0, shape[dim] - 1))
    operations = {
        "transpose": lambda t: t.transpose(dim, other).contiguous(),
        "permute": lambda t: t.permute(*range(1, len(shape)), 0),
        "chunk": lambda t: torch.chunk(t, 2, dim)[-1].contiguous(),
        "split": lambda t: torch.split(t, [first, shape[dim] - first], dim)[1],
        "slice": lambda t: t[first:] if first < shape[0] else t,
        "reshape": lambda t: t.reshape(new),
        "flatten": lambda t: t.reshape(-1, shape[-1]),
        "select": lambda t: t.select(dim, first) if len(shape) > 1 else t,
        "stack": lambda t: torch.stack(torch.unbind(t, dim)[::-1], other),
        "cat": lambda t: torch.cat(
            [t.narrow(dim, first, shape[dim] - first), t.narrow(dim, 0, first)], dim
        ),
        "unsqueeze": lambda t: t.unsqueeze(dim),
        "squeeze": lambda t: t.squeeze(dim) if len(shape) > 1 else t,
    }
    operation = operations[draw(st.sampled_from(sorted(operations)))]
    return operation(symbolic), operation(real)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Up to two intervals of each dimension."""
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=4, max_size=4))) for n in shape]
    return tuple(merge(((a, b), (c, d)) if b < c else ((a, d),)) for a, b, c, d in ends)


def indices(region: Region) -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(
        *(
            torch.tensor([i for a, b in runs for i in range(a, b)], dtype=torch.long)
            for runs in region
        ),
        indexing="ij",
    )


def read(composition: Composition, stored: Tensors, region: Region) -> torch.Tensor:
    value = torch.full([sum(b - a for a, b in runs) for runs in region], -1)
    for part in composition.parts(region):
        value[part.inside] = part.taken_from(stored[part.name][part.box].clone())
    return value


@given(st.data())
@examples(160)
def test_regions_are_read_and_put_back(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    stored = {
        n: torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * i
        for i, n in enumerate("ab")
    }
    both = [
        (SymbolicTensor(Composition.of(name, shape), tensor.dtype), tensor)
        for name, tensor in stored.items()
    ]
    dim = data.draw(st.integers(0, len(shape) - 1))
    join = data.draw(st.sampled_from((torch.stack, torch.cat)))
    symbolic, real = (join([pair[i] for pair in both], dim) for i in range(2))
    for _ in range(data.draw(st.integers(0, 5))):
        symbolic, real = data.draw(st.composite(apply)((symbolic, real)))
    assert isinstance(symbolic, SymbolicTensor)
    assert symbolic.shape == real.shape
    composition = symbolic.composition
    assert torch.equal(read(composition, stored, whole(tuple(real.shape))), real)
    assert sum(composition.elements.values()) == real.numel()
    region = data.draw(regions(tuple(real.shape)))
    piece = read(composition, stored, region)
    assert torch.equal(piece, real[indices(region)])
    for part in composition.parts(region):
        tensor, inside = part.put_back(piece)
        assert torch.equal(stored[part.name][indices(inside)], tensor)


def test_other_operations_are_refused() -> None:
    tensor = SymbolicTensor(Composition.of("a", (4, 4)), torch.float32)
    for operation in (lambda: tensor * 2, lambda: tensor[::2], lambda: tensor.to(torch.float64)):
        with pytest.raises(NotImplementedError, match=r"it calls aten|it takes one index of 2"):
            operation()
