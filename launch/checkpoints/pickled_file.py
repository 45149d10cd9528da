"""Files of tensors as `torch.save` writes them (`pytorch_model.bin`), read tensor by tensor."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .stored_tensor import ReadBox


class PickledFile:
    """A file of `torch.save` that is read: tensors by name, and no other objects.

    The file is mapped into memory, so that what is read of it is what is copied.

    Attributes:
        path: of the file.
        shapes: of its tensors, by name.
        dtypes: likewise.

    Raises:
        ValueError: it is damaged, of torch before 1.6, or has something else than tensors.
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        tensors = self._map()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes: dict[str, torch.dtype | None]
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    @contextmanager
    def opened(self) -> Iterator[ReadBox]:
        """Inside of the `with` block boxes are read by the function that it gives."""
        tensors = self._map()
        yield lambda name, box: tensors[name][box]

    def _map(self) -> dict[str, torch.Tensor]:
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.path} is damaged, or of torch before 1.6, or has something else than "
                f"tensors: {error}. Write the folder anew by the model's save_pretrained"
            ) from error
        if not isinstance(content, dict) or not all(
            isinstance(value, torch.Tensor) for value in content.values()
        ):
            raise ValueError(f"{self.path} holds something else than tensors by name")
        return content
