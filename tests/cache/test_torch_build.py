"""What torch is here: functions and kernels that somebody has replaced, settings, variables."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from cg.launch.cache.torch_build import Replaced, TorchBuild
from cg.launch.environment.config import Config

BUILD = TorchBuild()
"""Remembers what it has seen, as in a process."""


def test_it_is_the_same_at_each_call() -> None:
    assert BUILD.text() == BUILD.text() == TorchBuild().text()


@pytest.mark.parametrize("name", ["gelu", "layer_norm"])
def test_a_function_that_somebody_has_replaced_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, name, lambda x, *rest: x)
    with pytest.raises(
        Replaced, match=rf"torch\.nn\.functional\.{name} is a function of .*test_torch"
    ):
        BUILD.text()


def test_a_function_of_torch_under_another_name_is_another_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = BUILD.text()
    monkeypatch.setattr(functional, "gelu", functional.relu)
    assert BUILD.text() != before


@pytest.mark.parametrize(
    ("space", "name"), [(functional, "gelu"), (functional, "softmax"), (torch, "sin")]
)
@pytest.mark.parametrize("value", [None, torch.sin, torch.cos, torch.softmax])
def test_each_name_counts_with_what_it_stands_for(
    space: ModuleType, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = BUILD.text()
    if value is not vars(space)[name]:
        monkeypatch.setattr(space, name, value)
        assert BUILD.text() != before
    monkeypatch.delattr(space, name)
    assert BUILD.text() != before


def test_what_is_no_function_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BUILD.text()
    monkeypatch.setattr(torch, "a_module_that_is_loaded_late", torch.nn, raising=False)
    assert BUILD.text() == before


def test_classes_that_nobody_can_change_are_left_out() -> None:
    for cls in (torch._C.TensorBase, type(torch._C._VariableFunctions)):
        with pytest.raises(TypeError, match="immutable"):
            cls.sin = torch.cos


def test_a_kernel_of_another_is_named() -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("gelu_backward", lambda *args, **kwargs: args[0], "AutogradOther")
        with pytest.raises(Replaced, match="aten/gelu_backward has a kernel for AutogradOther"):
            BUILD.text()
    finally:
        library._destroy()


def _default_dtype(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def _fastpath(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(True)


def _paths_of_einsum(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(torch.backends.opt_einsum, "enabled", not torch.backends.opt_einsum.enabled)
    return patch.undo


@pytest.mark.parametrize("change", [_default_dtype, _fastpath, _paths_of_einsum])
def test_a_setting_is_part_of_it(
    change: Callable[[pytest.MonkeyPatch], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = BUILD.text()
    undo = change(monkeypatch)
    try:
        assert BUILD.text() != before
    finally:
        undo()
    assert BUILD.text() == before


def test_variables_of_torch_are_part_of_it() -> None:
    variables = Config.from_environ({"TORCH_OF_A_TEST": "1", "OTHER": "1"}).torch_variables
    assert variables == {"TORCH_OF_A_TEST": "1"}
    assert TorchBuild(variables).text() != TorchBuild().text()
