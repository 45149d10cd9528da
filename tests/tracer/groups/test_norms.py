"""Norms on meshes are those of the whole batch: values, gradients and what they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import cg

from ...sampling import examples
from ...worlds import virtual_world

CHANNELS = 4
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": lambda dims: BATCH_NORMS[dims](CHANNELS),
    "batch, fast": lambda dims: BATCH_NORMS[dims](CHANNELS, momentum=0.75, affine=False),
    "batch, averaging": lambda dims: BATCH_NORMS[dims](CHANNELS, momentum=None),
    "batch, without statistics": lambda dims: BATCH_NORMS[dims](
        CHANNELS, track_running_stats=False
    ),
    "instance": lambda dims: INSTANCE_NORMS[dims](CHANNELS, affine=True),
    "instance, with statistics": lambda dims: INSTANCE_NORMS[dims](
        CHANNELS, track_running_stats=True
    ),
    "group": lambda dims: nn.GroupNorm(2, CHANNELS),
}


@cg.actor
class Normed(nn.Module):
    """A convolution with a norm behind it, for inputs of several dimensions."""

    def __init__(self, norm: str, dims: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = CONVOLUTIONS[dims](2, CHANNELS, 2)
        self.norm = NORMS[norm](dims)
        self.head = nn.Linear(CHANNELS, 3)
        self.to(dtype)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.norm(self.stem(x))).flatten(2).mean(2))
        return made

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().sum()

    def at_rest(self, x: Tensor) -> Tensor:
        """The loss with the statistics that have been counted."""
        self.norm.eval()
        loss = self.loss(x)
        self.norm.train()
        return loss

    def frozen(self, x: Tensor) -> Tensor:
        """The loss of a norm at rest, whose backward reads statistics."""
        norm: Any = self.norm
        h = nn.functional.batch_norm(self.stem(x), norm.running_mean, norm.running_var)
        return self.head(h.flatten(2).mean(2)).square().sum()

    def shrink(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)

    def twice(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.loss, x, use_reentrant=False)
        return made

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


ROWS = {"forward(x)|loss(x)|at_rest(x)|frozen(x)|twice(x)": cg.cut(0, "dp")}
CUT = {**ROWS, "stem.*": cg.cut(0, "tp"), "head.weight": cg.cut(1, "tp")}
"""Rows along `dp`, channels along `tp`."""

_world = virtual_world(6)


def plan_of(module: nn.Module) -> dict[str, Any]:
    """`CUT`, with each tensor of the norm that has a number for each channel."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    of_channels = [n for n, t in tensors if n.startswith("norm.") and t.dim()]
    return {**CUT, **({"|".join(of_channels): cg.cut(0, "tp")} if of_channels else {})}


def assert_equal(actor: Any, plain: nn.Module, tolerance: float = 1e-9) -> None:
    """Hold the pieces of all ranks against the tensors of one process."""
    whole = plain.state_dict()
    for rank, instance in actor.instances.items():
        for path, tensor in instance.state_dict().items():
            logical = actor._group.logical[path]
            expected = whole[path]
            if logical.layout is not None:
                region = logical.layout.region(logical.shape, actor.place.position(rank))
                for dim, intervals in enumerate(region):
                    rows = [i for start, stop in intervals for i in range(start, stop)]
                    expected = expected.index_select(dim, torch.tensor(rows, dtype=torch.int64))
            torch.testing.assert_close(
                *(tensor, expected),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, p=path: f"{p}: {m}",
            )


@pytest.mark.parametrize("norm", NORMS)
@given(data=st.data())
@examples(12)
def test_norms_of_pieces_train_as_in_one_process(norm: str, data: st.DataObject) -> None:
    """With rows that are cut, in pieces of any size; with channels that are; and stored."""
    dims, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7))
    dp, tp = data.draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (3, 2)]))
    stored = data.draw(st.booleans())
    cuts = data.draw(st.booleans()) and tp == 2
    count = data.draw(st.sampled_from([1, 2])) if rows in (4, 6) else 1
    plain = Normed(norm, dims)
    actor = Normed.on(  # type: ignore[attr-defined]
        cg.mesh(dp=dp, tp=tp),
        plan=plan_of(plain) if cuts else ROWS,
        store=cg.cut(0, "dp") if stored else cg.whole,
    )(norm, dims)

    def step(x: Tensor) -> Any:
        losses = []
        for part in cg.microbatches(x, count):
            losses.append(actor.loss(part))
            cg.backward(losses[-1])
        actor.update()
        return losses, actor.at_rest(x)

    compiled = cg.trace(step)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 2, *[4] * dims, generator=generator, dtype=torch.float64)
        expected = []
        for part in x.tensor_split(count):
            loss = plain.loss(part)
            loss.backward()
            expected.append(loss.detach())
        plain.update()
        found = compiled(x)
        torch.testing.assert_close(found, (expected, plain.at_rest(x).detach()))
        assert_equal(actor, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["batch", "batch, averaging", "instance, with statistics"])
def test_norms_of_16_bits_add_up_in_32(norm: str, dtype: torch.dtype) -> None:
    """The sum of 4096 numbers near 8 is beyond float16."""
    x = (torch.randn(64, 2, 9, generator=torch.Generator().manual_seed(0)) + 8).to(dtype)
    plain = Normed(norm, 1, dtype)
    actor = Normed.on(cg.mesh(dp=2), plan=ROWS)(norm, 1, dtype)  # type: ignore[attr-defined]
    found = cg.trace(lambda x: actor.loss(x))(x)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, plain.loss(x).detach(), rtol=tolerance, atol=tolerance)
    assert_equal(actor, plain, tolerance)


@pytest.mark.parametrize("store", [cg.whole, cg.cut(0, "dp")], ids=["whole", "stored"])
def test_two_forwards_before_one_backward(store: Any) -> None:
    """As of real and made images: the second forward counts before the first one's backward."""
    plain = Normed("batch", 2)
    actor = Normed.on(cg.mesh(dp=2), plan=ROWS, store=store)("batch", 2)  # type: ignore[attr-defined]

    def work(actor: Any, x: Tensor, y: Tensor, backward: Callable[[Any], None]) -> Tensor:
        loss: Tensor = actor.loss(x) + 2 * actor.loss(y)
        backward(loss)
        actor.update()
        return loss

    step = cg.trace(lambda x, y: work(actor, x, y, cg.backward))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 5, 2, 4, 4, generator=generator, dtype=torch.float64)
        expected = work(plain, x, y, lambda loss: loss.backward())
        torch.testing.assert_close(step(x, y), expected.detach())
    assert_equal(actor, plain)


def test_a_backward_reads_statistics_as_they_were() -> None:
    """Another method counts between a forward of a norm at rest and its backward."""
    plain = Normed("batch", 1)
    actor = Normed.on(cg.mesh(dp=2), plan=ROWS)("batch", 1)  # type: ignore[attr-defined]

    def step(x: Tensor) -> None:
        cg.backward(actor.frozen(x) + actor.loss(x))
        actor.update()

    compiled = cg.trace(step)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 2, 4, generator=generator, dtype=torch.float64)
        plain.frozen(x).backward()
        plain.loss(x).backward()
        plain.update()
        compiled(x)
        assert_equal(actor, plain)


def test_what_a_backward_reads_is_not_written_before_it() -> None:
    actor = Normed.on(cg.mesh(dp=2), plan=ROWS)("batch", 1)  # type: ignore[attr-defined]

    def step(x: Tensor) -> None:
        loss = actor.loss(x)
        actor.shrink()
        cg.backward(loss)

    message = r"gradient of Normed\.loss needs 'head\.weight' .* changed it: @normed\d*\.shrink"
    with pytest.raises(cg.TraceError, match=message):
        cg.trace(step).lower(torch.ones(4, 2, 4, dtype=torch.float64))


def test_a_backward_that_writes_is_refused() -> None:
    """As a checkpoint around a batch norm, which would count each batch twice."""
    actor = Normed.on(cg.mesh(dp=2), plan=ROWS)("batch", 1)  # type: ignore[attr-defined]
    with pytest.raises(cg.TraceError, match=r"it changes 'norm\.running_mean' in its backward"):
        cg.trace(lambda x: cg.backward(actor.twice(x))).lower(
            torch.ones(4, 2, 4, dtype=torch.float64)
        )


class Reparametrized(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = kind(nn.Linear(4, 6)), nn.Linear(6, 4)
        self.double()

    def loss(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(x))).square().sum()
        return made


WEIGHTS = {
    "rows": (weight_norm, "up.parametrizations.weight.original?"),
    "columns": (lambda m: weight_norm(m, dim=1), "up.parametrizations.weight.original1"),
    "all": (
        lambda m: weight_norm(m, dim=None),  # type: ignore[arg-type]
        "up.parametrizations.weight.original1",
    ),
    "spectral": (
        spectral_norm,
        "up.parametrizations.weight.original|up.parametrizations.weight.0._u",
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("place", ["dp", "dp-tp", "stored"])
def test_weights_that_are_computed_train_as_in_one_process(kind: str, place: str) -> None:
    function, cut = WEIGHTS[kind]
    plan = {"loss(x)": cg.cut(0, "dp")}
    if place == "dp-tp":
        plan |= {cut: cg.cut(0, "tp"), "up.bias": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}

    @cg.actor
    class Actor(Reparametrized):
        def __init__(self, kind: Callable[..., nn.Module]) -> None:
            super().__init__(kind)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

        @cg.opaque
        def update(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    on: Any = Actor
    store = cg.cut(0, "dp") if place == "stored" else cg.whole
    actor = on.on(cg.mesh(dp=2, tp=2), plan=plan, store=store)(function)
    plain = Actor(function)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = actor.loss(x)
        cg.backward(loss)
        actor.update()
        return loss

    compiled = cg.trace(step)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        loss = plain.loss(x)
        loss.backward()
        plain.update()
        torch.testing.assert_close(compiled(x), loss.detach())
        assert_equal(actor, plain)
