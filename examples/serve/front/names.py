"""Names by which clients call what is served: the model, and its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import fields
from .errors import ApiError


@dataclass(frozen=True)
class Names:
    """The names of what is served.

    Attributes:
        model: of the model; answers have the first.
        adapters: of its adapters, in their order.

    Raises:
        ValueError: two of them are equal.
    """

    model: tuple[str, ...]
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        several = {name for name in self.all if self.all.count(name) > 1}
        if several:
            raise ValueError(
                f"two things would be served by one name: {', '.join(sorted(several))}"
            )

    @property
    def all(self) -> tuple[str, ...]:
        """All names."""
        return self.model + self.adapters

    def asked(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """The name that an answer has, and the number of an adapter, from 1; 0: the model alone.

        A body without a name means the model.

        Raises:
            ApiError: 404 for another name.
        """
        name = fields.string(body, "model", self.model[0])
        if name in self.adapters:
            return name, 1 + self.adapters.index(name)
        if name not in self.model:
            ours = ", ".join(f"'{one}'" for one in self.all)
            message = f"the model '{name[:100]}' does not exist; this server has {ours}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.model[0], 0
