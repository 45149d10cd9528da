"""Methods with assertions on values; pytest does not rewrite the assertions of this module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_small(value: Any) -> bool:
    return bool(value < 9)


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def number(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 0, "an assertion on no values"
        assert x.max().item() <= 5
        return x * self.scale

    def precise(self, x: torch.Tensor) -> torch.Tensor:
        assert 0.1 > x[0, 0].item()  # noqa: SIM300
        return x * self.scale

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 2).sum()
        assert count.item() == 3 and x.min().item() > -1 and (x < 9).all(), (  # noqa: PT018
            f"there are {count} such numbers"
        )
        return x * self.scale

    def called(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(x).all()
        return x * self.scale

    def named(self, x: torch.Tensor) -> torch.Tensor:
        small = (x < 6).all()
        assert small, "there are large numbers"
        return x * self.scale

    def chained(self, x: torch.Tensor) -> torch.Tensor:
        assert (x < 6).all() and -1 < x.min() < 9 and not self.training is None  # noqa: E714, PT018
        return x * self.scale

    def either(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max().item() <= 5 or x.min().item() < 0
        return x

    def less_or(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() < 9 and ((x > 9).any() or (x < 9).any())  # noqa: PT018
        return x

    def less_not(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() < 9 and not (x > 9).any()  # noqa: PT018
        return x

    def negated(self, x: torch.Tensor) -> torch.Tensor:
        assert not (x > 9).any()
        return x

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        assert any([(x > 9).any(), (x < 9).any()])
        return x

    def listed(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max().item() not in (7, 8)
        return x

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        assert 2 * x.max().item() < 19
        return x

    def bare(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max().item()
        return x

    def asked(self, x: torch.Tensor) -> torch.Tensor:
        assert is_small(x.max())
        return x

    def behind(self, x: torch.Tensor) -> torch.Tensor:
        value = x.max().item()
        assert value < 9
        return x
