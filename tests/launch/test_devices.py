"""The device that a rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cg.backends.devices import find
from cg.launch.environment.config import Config, ConfigError
from cg.launch.world.devices import DeviceError, VisibleDevices, declined, for_rank, look


class Some:
    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, device: int, /) -> None: ...


def see(wanted: str, names: str) -> VisibleDevices:
    """The sight of a rank that is shown devices of these names, one letter each."""
    return look(
        wanted,
        Some(len(names)),
        present=lambda: "cuda" if names else None,
        name=lambda kind, index: f"{kind} {names[index]}",
    )


def choose(wanted: str, shown: Sequence[str]) -> list[Any]:
    """The devices of the ranks of a machine, by what each is shown; the index is each one's own."""
    sights = [see(wanted, names) for names in shown]
    made = [
        for_rank(rank, sights, make=lambda kind, index: f"{kind}:{index}")  # type: ignore[arg-type,return-value]
        for rank in range(len(shown))
    ]
    assert (declined([sights]) is None) == (made != [None] * len(shown) or not any(shown))
    return made


@pytest.mark.parametrize(
    ("shown", "devices"),
    [
        (["ab", "ab"], ["cuda:0", "cuda:1"]),
        (["abcd", "abcd"], ["cuda:0", "cuda:1"]),
        (["a", "b"], ["cuda:0", "cuda:0"]),
        (["a", "b", "c", "d"], ["cuda:0"] * 4),
        (["ab", "cd"], ["cuda:0", "cuda:1"]),
        (["ab", "ba"], ["cuda:0", "cuda:0"]),
        (["ab", "cd", "ef"], ["cuda:0"] * 3),
        (["a", ""], ["cuda:0", None]),
        (["", ""], [None, None]),
        (["a", "a"], [None, None]),
        (["a", "b", "a"], [None] * 3),
        (["ab", "ab", "ab"], [None] * 3),
    ],
)
def test_a_rank_gets_a_device_that_no_other_has(
    shown: Sequence[str], devices: Sequence[str | None]
) -> None:
    assert choose("auto", shown) == devices
    if None not in devices:
        assert choose("cuda", shown) == devices


def test_ranks_on_the_host_take_no_device() -> None:
    sights = [see("auto", "a"), see("cpu", "a")]
    assert sights[1] == VisibleDevices("cpu")
    assert for_rank(0, sights, make=lambda kind, index: index) == 0  # type: ignore[arg-type,return-value]
    assert for_rank(1, sights) is None
    assert declined([sights, [see("cpu", "a")] * 2]) is None


def test_a_kind_that_the_machine_lacks() -> None:
    with pytest.raises(DeviceError, match="CG_DEVICE=cuda asks for an accelerator that this"):
        choose("cuda", ["", ""])
    with pytest.raises(DeviceError, match="it has 2 of kind 'cuda'"):
        choose("npu", ["ab", "ab"])


def test_ranks_do_not_share_a_device() -> None:
    said = r"2 ranks of one machine would share accelerators. They see 1 in all \(cuda a\)"
    with pytest.raises(DeviceError, match="CG_DEVICE=cuda: " + said):
        choose("cuda", ["a", "a"])
    with pytest.raises(DeviceError, match=r"They see 2 in all \(cuda a, cuda b\)"):
        choose("cuda", ["ab", "ab", "ab"])


def test_auto_says_of_any_machine_why_it_leaves_accelerators_alone() -> None:
    fine, short = [see("auto", "ab")] * 2, [see("auto", "a")] * 3
    assert declined([fine, fine]) is None
    said = declined([fine, short])
    assert said is not None
    assert said.startswith("CG_DEVICE=auto leaves actors on the host: 3 ranks of one machine")
    assert "or set CG_DEVICE=cpu" in said


@pytest.mark.parametrize(
    ("properties", "name"),
    [({"uuid": 7}, "7"), ({}, "number 3, which torch does not name")],
)
def test_a_device_has_the_name_that_torch_gives_it(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, int], name: str
) -> None:
    def of(index: int) -> Any:
        assert index == 3
        return type("Properties", (), properties)

    module = type("Module", (), {"get_device_properties": staticmethod(of)})
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert find.name("cuda", 3) == name


def test_the_setting() -> None:
    assert Config.from_environ({"CG_DEVICE": "cpu"}).device == "cpu"
    with pytest.raises(
        ConfigError, match="CG_DEVICE='0 1': it takes `auto`, `cpu`, `fake`, or a kind"
    ):
        Config.from_environ({"CG_DEVICE": "0 1"})
