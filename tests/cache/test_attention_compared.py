"""Attention of modules that nobody has loaded: a comparison does not load them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cg.tracer.method.attention import varlen_calls
from cg.tracer.method.attention.varlen_calls import attention_compared
from cg.tracer.method.purity.function_log import Unlike

MODULES = tuple(varlen_calls._TRACED)


def test_a_comparison_loads_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with attention_compared("a call"):
        pass
    assert sys.modules.keys().isdisjoint(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_call_that_loads_one_is_unlike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(Unlike), attention_compared("a call"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
