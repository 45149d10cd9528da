"""Make many fakes of one mode: what its constructor sets is the same for all on one device.

Torch's constructor takes three times as long, most of it for attributes in which no two differ. A
comparison with a kept trace makes a fake for each tensor of a state, and for each result of a torch
function, which is a tenth of its time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class PlainFakes:
    """Makes fakes that no constant, and no class of its own, stands behind.

    Args:
        mode: of the fakes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def of(self, plain: torch.Tensor, device: torch.device) -> FakeTensor:
        """The fake of a tensor.

        Args:
            plain: a tensor on the device `meta`, which needs no gradient.
            device: of the tensor for which the fake stands.
        """
        known = self._known.get(device)
        if known is None:
            first = FakeTensor(self._mode, plain, device)
            self._known[device] = first.fake_device, dict(vars(first))
            return first
        fake_device, attributes = known
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor,
            plain,
            False,
            dispatch_device=True,
            device_for_backend_keys=fake_device,
        )
        if self._mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake
