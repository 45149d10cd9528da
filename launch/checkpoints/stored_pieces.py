"""Pieces of a model's tensors as pieces of the tensors that a folder of the model has for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..conversions.composition import Composition
from .held import SavedPiece
from .stored_tensor import StoredTensor
from .weights import Weights


@dataclass(frozen=True)
class PartNames:
    """A part of a model, and the names that the model's library has for its tensors.

    Attributes:
        part: None if it is on ranks of other processes.
        tied: all names of a tensor that has several, by the first of them.
    """

    part: nn.Module | None
    tied: Mapping[str, tuple[str, ...]]

    def compositions(
        self, own_pieces: Iterable[SavedPiece], folder: Weights
    ) -> dict[str, Composition]:
        """The compositions of the tensors of pieces, by the pieces' names, if a folder has them.

        Raises:
            ValueError: the library converts tensors by an operation that cg cannot follow.
        """
        shapes = {piece.name: piece.shape for piece in own_pieces}
        names = {name: self.tied.get(name, (name,)) for name in shapes}
        every = {n: shapes[name] for name, several in names.items() for n in several}
        compositions = folder.conversion(self.part, every).compositions
        stored = {name: [n for n in names[name] if n in compositions] for name in names}
        return {name: compositions[several[0]] for name, several in stored.items() if several}


def stored_pieces(
    own_pieces: Sequence[SavedPiece], names: PartNames, like: Weights
) -> Iterator[SavedPiece]:
    """Pieces by the names and in the shapes of a folder.

    Tensors that the folder has not, or has in another shape, keep their names and shapes.

    Args:
        own_pieces: of the tensors of a part of a model, by the names of the model's library.
        names: of the part.
        like: the folder.

    Raises:
        ValueError: the name of a tensor that the folder has not is there that of another tensor; or
            the library converts tensors by an operation that cg cannot follow.
    """
    shapes = {piece.name: piece.shape for piece in own_pieces}
    compositions = _reversible(names.compositions(own_pieces, like), shapes, like)
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
    own_pieces: Iterable[SavedPiece], names: PartNames, weights: Weights, actor: str
) -> dict[str, StoredTensor]:
    """The tensors of a folder that pieces are of, by name.

    Args:
        own_pieces, names: as for `stored_pieces`.
        weights: the folder.
        actor: whose they are, for messages.

    Raises:
        KeyError: the folder lacks one.
        ValueError: it has one of another shape or element type.
    """
    expected = {piece.name: piece for piece in own_pieces}
    compositions = names.compositions(expected.values(), weights)
    tensors = {}
    for name, piece in expected.items():
        if name not in compositions:
            raise KeyError(f"{weights.folder} has no '{name}', which {actor} has")
        tensors[name] = StoredTensor(compositions[name], weights.files)
        tensors[name].check(name, piece.shape, piece.tensor.dtype)
    return tensors


def _reversible(
    compositions: Mapping[str, Composition], shapes: Mapping[str, tuple[int, ...]], like: Weights
) -> dict[str, Composition]:
    """Those of the tensors' shapes that are whole stored tensors, or made up of such."""
    fitting = {name: c for name, c in compositions.items() if c.shape == shapes[name]}
    elements: Counter[str] = Counter()
    for composition in fitting.values():
        elements.update(composition.elements)
    partial = {n for n in elements if elements[n] != math.prod(like.files[n].shapes[n])}
    return {n: c for n, c in fitting.items() if partial.isdisjoint(c.names)}


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
