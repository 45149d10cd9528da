"""Make models without memory for their parameters, which are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside the `with` block, parameters of new modules are on the meta device.

    ```python
    with cg.empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    ```

    Buffers are computed as usual, since files of weights lack many, such as rotary tables. So the
    model takes no memory for its weights, and has everything else. An actor fills those that it
    keeps (`init=`). Tied parameters stay tied.
    """
    handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), parameter.requires_grad)
