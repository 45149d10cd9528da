"""Fake tensors as JSON: their types, and which of them share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...values.operators import storage_key
from .plain_fakes import PlainFakes
from .plain_text import Damaged, Json, NotStorable, decoded, encoded


class FakeWriter:
    """Writes fakes; those that share memory have the number of one storage.

    Attributes:
        storages: the bytes of each storage.
    """

    def __init__(self) -> None:
        self.storages: list[int] = []
        self._numbers: dict[int | None, int] = {}
        self._kinds: dict[tuple[torch.dtype, torch.device], Json] = {}

    def json(self, value: torch.Tensor, requires_grad: bool = False) -> Json:
        """The JSON of a fake.

        Args:
            value: the fake.
            requires_grad: what the fake that is read shall say.

        Raises:
            NotStorable: it is not dense, or is conjugated or negated lazily.
        """
        if (
            type(value) is not FakeTensor
            or value.layout is not torch.strided
            or value.is_conj()
            or value.is_neg()
            or value.is_quantized
        ):
            raise NotStorable("a value that is not a dense tensor has no text")
        key = storage_key(value)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.storages)
            self.storages.append(value.untyped_storage().nbytes())
        kind = (value.dtype, value.device)
        if kind not in self._kinds:
            self._kinds[kind] = [encoded(value.dtype), encoded(value.device)]
        shape, stride = list(map(int, value.shape)), list(map(int, value.stride()))
        return [
            *self._kinds[kind],
            *(shape, stride, int(value.storage_offset()), number, int(requires_grad)),
        ]


class FakeReader:
    """Makes the fakes of a text.

    Args:
        mode: makes them.
        storages: the bytes of each storage.
    """

    def __init__(self, mode: FakeTensorMode, storages: Sequence[int]) -> None:
        self._fakes = PlainFakes(mode)
        self._sizes = storages
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kinds: dict[tuple[Any, ...], tuple[torch.dtype, torch.device]] = {}

    def fake(self, json: Json) -> torch.Tensor:
        """The fake of a JSON.

        Raises:
            Damaged: it is none that `FakeWriter` gives.
        """
        try:
            dtype_json, device_json, shape, stride, offset, number, requires_grad = json
            dtype, device = self._kind(dtype_json, device_json)
            storage = self._storage(number)
            plain = torch.empty(0, dtype=dtype, device="meta")
            plain.set_(storage, offset, shape, stride)
            fake = self._fakes.of(plain, device)
            return fake.requires_grad_() if requires_grad else fake
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise Damaged(f"a tensor: {error}") from error

    def _kind(self, dtype: Json, device: Json) -> tuple[torch.dtype, torch.device]:
        key = (*dtype, *device)
        if key not in self._kinds:
            kind: tuple[Any, Any] = (decoded(dtype), decoded(device))
            if not (isinstance(kind[0], torch.dtype) and isinstance(kind[1], torch.device)):
                raise Damaged("a tensor has no type or no device")
            self._kinds[key] = kind
        return self._kinds[key]

    def _storage(self, number: int) -> torch.UntypedStorage:
        if number not in self._storages:
            size = self._sizes[number]
            storage = torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
            self._storages[number] = storage
        return self._storages[number]
