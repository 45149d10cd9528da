"""What a choice of memory assumes of devices of a kind."""

from __future__ import annotations

import pytest

from cg.ir.flops import WORK_OF_MILLISECOND
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.pipeline.device_speed import DeviceSpeed


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 50.0),
        ("NVIDIA H100 80GB HBM3", 50.0),
        ("NVIDIA A100-SXM4-80GB", 25.0),
        ("NVIDIA GH200 480GB", 300.0),
        ("NVIDIA GeForce RTX 4090", 25.0),
    ],
)
def test_devices_are_known_by_a_word_of_their_name(name: str, bandwidth: float) -> None:
    assert DeviceSpeed.named(name).host == Link(0.01, bandwidth)


@pytest.mark.parametrize("name", ["", "NVIDIA RTX A1000 Laptop GPU", "Ascend910B2"])
def test_others_have_the_default(name: str) -> None:
    assert DeviceSpeed.named(name) == DeviceSpeed(WORK_OF_MILLISECOND, Costs().host)


def test_copies_hide_on_each_of_several_devices() -> None:
    slow, fast = DeviceSpeed.named("NVIDIA A100-SXM4-40GB"), DeviceSpeed.named("NVIDIA H200")
    assert DeviceSpeed.for_all([slow, fast]) == DeviceSpeed(fast.work, slow.host)
    assert DeviceSpeed.for_all([slow]) == slow
