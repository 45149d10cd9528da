"""Make models without memory for their parameters, which are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside the `with` block, parameters of new modules are on the meta device.

    ```python
    with cg.empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    ```

    So are buffers that `state_dict` has, once the block ends: files of weights have them. Other
    buffers are computed as usual, such as rotary tables. So the model takes no memory for its
    weights, and has everything else. An actor fills those that it keeps (`init=`). Tied parameters
    stay tied.
    """
    buffers: list[tuple[nn.Module, str]] = []

    def note(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        buffers.append((module, name))

    handles = (
        register_module_parameter_registration_hook(_on_meta),  # type: ignore[arg-type]
        register_module_buffer_registration_hook(note),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module, name in buffers:
        buffer = module._buffers.get(name)
        if buffer is not None and name not in module._non_persistent_buffers_set:
            module._buffers[name] = buffer.to("meta")


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), parameter.requires_grad)
