"""Memory of the layout of tensors that are gone."""

from __future__ import annotations

import torch

from cg.backends.devices.programs.tensor_memory import laid_out, layouts, storage


def test_memory_is_laid_out_as_tensors_were() -> None:
    whole = torch.ones(4, 6)
    values = [
        whole[:, 2:4],  # shares its memory with the next one
        whole.t(),
        torch.ones(3, 5).t(),
        torch.ones(4, 6, dtype=torch.bfloat16)[:, 2:4],
        torch.ones(2, 0),
        torch.ones((), dtype=torch.int64),
    ]
    made = laid_out(layouts(values))
    assert [x.shape for x in made] == [x.shape for x in values]
    assert [x.dtype for x in made] == [x.dtype for x in values]
    strides = [x.stride() for x in values]
    strides[3] = (2, 1)  # what it is a part of is not made for it alone
    assert [x.stride() for x in made] == strides
    assert len({storage(x) for x in made if x.numel()}) == 4
    assert all(not x.any() for x in made)
    made[0].fill_(1)
    assert made[1].sum() == made[0].numel()
    assert all(not x.any() for x in made[2:])
    assert all(x.all() for x in values)
