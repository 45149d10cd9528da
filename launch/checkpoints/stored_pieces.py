"""Pieces of a model's tensors as pieces of the tensors that a folder of the model has for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..conversions.composition import Composition
from .held import SavedPiece
from .stored_tensor import StoredTensor
from .weights import Weights


def stored_pieces(
    own_pieces: Sequence[SavedPiece], part: nn.Module | None, like: Weights
) -> Iterator[SavedPiece]:
    """Pieces by the names and in the shapes of a folder.

    Tensors that the folder has not, or has in another shape, keep their names and shapes.

    Args:
        own_pieces: of the tensors of a part of a model, by the names of the model's library.
        part: the part, whose library says how the folder's tensors make up the model's.
        like: the folder.

    Raises:
        ValueError: the name of a tensor that the folder has not is there that of another tensor; or
            the library converts tensors by an operation that cg cannot follow.
    """
    compositions = _reversible(own_pieces, part, like)
    taken = {name for composition in compositions.values() for name in composition.names}
    for piece in own_pieces:
        composition = compositions.get(piece.name)
        if composition is not None:
            yield from _parts_of(piece, composition, like)
        elif piece.name not in taken:
            yield piece
        else:
            raise ValueError(
                f"{like.folder} has not '{piece.name}' of the model, and calls another tensor so; "
                "save without like, and copy its other files"
            )


def stored_tensors(
    own_pieces: Iterable[SavedPiece], part: nn.Module | None, weights: Weights, actor: str
) -> dict[str, StoredTensor]:
    """The tensors of a folder that pieces are of, by name.

    Args:
        own_pieces, part: as for `stored_pieces`.
        weights: the folder.
        actor: whose they are, for messages.

    Raises:
        KeyError: the folder lacks one.
        ValueError: it has one of another shape or element type.
    """
    expected = {piece.name: piece for piece in own_pieces}
    shapes = {name: piece.shape for name, piece in expected.items()}
    compositions = weights.conversion(part, shapes).compositions
    tensors = {}
    for name, piece in expected.items():
        if name not in compositions:
            raise KeyError(f"{weights.folder} has no '{name}', which {actor} has")
        tensors[name] = StoredTensor(compositions[name], weights.files)
        tensors[name].check(name, piece.shape, piece.tensor.dtype)
    return tensors


def _reversible(
    own_pieces: Sequence[SavedPiece], part: nn.Module | None, like: Weights
) -> Mapping[str, Composition]:
    """The tensors of pieces that are whole stored tensors of a folder, or made up of such."""
    shapes = {piece.name: piece.shape for piece in own_pieces}
    compositions = like.conversion(part, shapes).compositions
    fitting = {n: a for n, a in compositions.items() if a.shape == shapes.get(n)}
    elements: Counter[str] = Counter()
    for composition in fitting.values():
        elements.update(composition.elements)
    partial = {n for n in elements if elements[n] != math.prod(like.files[n].shapes[n])}
    return {n: a for n, a in fitting.items() if partial.isdisjoint(a.names)}


def _parts_of(piece: SavedPiece, composition: Composition, like: Weights) -> Iterator[SavedPiece]:
    """The pieces of stored tensors that a piece of a tensor consists of."""
    name = composition.names[0]
    if StoredTensor(composition, like.files).is_whole(name):
        yield replace(piece, name=name)
        return
    for part in composition.parts(piece.region):
        tensor, region = part.put_back(piece.tensor.detach())
        shape = like.files[part.name].shapes[part.name]
        yield SavedPiece(part.name, tensor, shape, region, piece.counts)
