"""Which device a rank gets."""

from __future__ import annotations

from typing import Any

import pytest

from cg.launch.config import Config, ConfigError
from cg.launch.devices import DeviceError, for_rank


class Some:
    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, device: int, /) -> None: ...


def choose(wanted: str, count: int, local_rank: int = 1, local_size: int = 2) -> Any:
    return for_rank(
        wanted,
        local_rank,
        local_size,
        Some(count),
        present=lambda: "cuda" if count else None,
        make=lambda kind, index: f"{kind}:{index}",  # type: ignore[arg-type,return-value]
    )


@pytest.mark.parametrize(
    ("wanted", "count", "device"),
    [
        ("auto", 2, "cuda:1"),
        ("auto", 4, "cuda:1"),
        ("auto", 0, None),
        ("auto", 1, None),
        ("cuda", 2, "cuda:1"),
        ("cpu", 2, None),
    ],
)
def test_a_rank_gets_the_device_of_its_local_rank(
    wanted: str, count: int, device: str | None
) -> None:
    assert choose(wanted, count) == device


def test_a_kind_that_the_machine_lacks() -> None:
    with pytest.raises(DeviceError, match="CG_DEVICE=cuda asks for an accelerator that this"):
        choose("cuda", 0)
    with pytest.raises(DeviceError, match="it has 2 of kind 'cuda'"):
        choose("npu", 2)


def test_ranks_do_not_share_a_device() -> None:
    with pytest.raises(DeviceError, match="2 ranks of this machine would share 1 devices"):
        choose("cuda", 1)


def test_the_setting() -> None:
    assert Config.from_environ({"CG_DEVICE": "cpu"}).device == "cpu"
    with pytest.raises(ConfigError, match="CG_DEVICE='0 1': it takes `auto`, `cpu`, or a kind"):
        Config.from_environ({"CG_DEVICE": "0 1"})
