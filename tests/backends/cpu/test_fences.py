"""Fences: each kind that this machine offers can be called, and one is always found."""

from __future__ import annotations

import platform

import pytest

from cg.backends.cpu.memory import fences
from cg.backends.errors import TransportError


def test_one_is_found() -> None:
    fences.full_fence()()


def test_one_is_found_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "native", None)
    fences.full_fence()()


@pytest.mark.parametrize("kind", [fences.libatomic_fence, fences.membarrier_fence])
def test_each_kind_works_where_it_exists(kind: object) -> None:
    assert callable(kind)
    fence = kind()
    if fence is None:
        pytest.skip("this machine does not offer it")
    assert not fence()


def test_aarch64_orders_payload_and_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert fences.publish_fence(lambda: calls.append("fence")) is not None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert fences.publish_fence(lambda: calls.append("fence")) is None


def test_no_fence_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "native", None)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(fences, "libatomic_fence", lambda: None)
    with pytest.raises(TransportError, match="install libatomic"):
        fences.full_fence()
