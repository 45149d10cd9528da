"""Equal layers that write to caches are traced once, and write what plain Python writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cg.tracer.errors import TraceError
from cg.tracer.method import joint
from cg.tracer.values.operators import storage_key

from ..sampling import examples
from .alike_models import SIZE
from .test_alike import Tracing, counted

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return counted(monkeypatch)


class Writing(nn.Module):
    """A layer that writes its values to rows of a cache, and adds what a cache has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.mark = 0.0

    def forward(self, x: Tensor, write: Tensor, read: Tensor) -> Tensor:
        x = self.linear(x)
        if self.mark:
            x = x * self.mark
        write.index_copy_(0, rows(x), x)
        return torch.relu(x + read.index_select(0, rows(x)))


def rows(x: Tensor) -> Tensor:
    """The rows of the caches that values go to, and come from."""
    return (x[:, 0] * 0).long() + torch.arange(len(x))


Choose = Callable[["Caches", int], tuple[Tensor, Tensor]]
"""The caches that a layer writes to and reads from."""


class Caches(nn.Module):
    """Layers, and a cache for each; what a layer writes to and reads from is chosen by a test."""

    def __init__(self, count: int, choose: Choose, trains: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Writing() for _ in range(count))
        self.requires_grad_(trains)
        for index in range(count):
            self.register_buffer(f"cache{index}", torch.randn(6, SIZE))
        self.register_buffer("wide", torch.randn(12, SIZE))
        self.choose = choose

    def cache(self, index: int) -> Tensor:
        tensor: Tensor = getattr(self, f"cache{index % len(self.layers)}")
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, *self.choose(self, index))
        return x


def own(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    return stage.cache(index), stage.cache(index)


def of_the_last(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    """The first layer has a block of its own: what it writes to and reads is one tensor."""
    return stage.cache(index), stage.cache(max(0, index - 1))


def of_the_next(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    return stage.cache(index), stage.cache(index + 1)


def one(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    return stage.cache(0), stage.cache(1)


def views(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    """Rows of one tensor, which the layers' rows overlap."""
    return stage.wide[index : index + 6], stage.wide[index + 2 : index + 8]


def sharing(stage: Caches, index: int) -> tuple[Tensor, Tensor]:
    """Layer by layer two tensors, and two views of one."""
    whole = stage.cache(index).view(-1, SIZE)
    return (whole, stage.cache(index).view(6, SIZE)) if index % 2 else of_the_next(stage, index)


CHOICES: dict[Choose, int] = {
    own: 3 + 4,
    of_the_last: 2 + 4,
    of_the_next: 0,
    one: 0,
    views: 0,
    sharing: 0,
}
"""How layers choose, and the copies of the trace and of the run that looks for hidden state.

There are none if a copy writes to what others have used.
"""


@pytest.mark.parametrize("choose", CHOICES)
def test_layers_that_write_to_caches(choose: Choose, traces: Counter[str]) -> None:
    Tracing().check(lambda: Caches(4, choose), needs_grad=False)  # type: ignore[arg-type,return-value]
    if CHOICES[choose]:
        assert traces == {"traces": 1, "copies": CHOICES[choose]}
    else:
        assert traces["traces"] == 2  # the second one without blocks


def graphs_of(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Of the traces of a stage what state they write to, and nodes with the memory they share."""
    graphs: list[list[Any]] = []
    trace = joint._JointTrace.trace

    def kept(self: Any) -> Any:
        traced = trace(self)
        memory: dict[Any, int] = {}
        graphs.append([sorted(traced.written)])
        for node in traced.graph.nodes:
            value = node.meta.get("val")
            kind: tuple[Any, ...] = ()
            if isinstance(value, Tensor):
                shared = memory.setdefault(storage_key(value), len(memory))
                kind = value.dtype, value.shape, value.stride(), value.storage_offset(), shared
            line = traced.locations.get(node.name)
            graphs[-1].append((node.format_node(), kind, line and line.line))
        return traced

    with monkeypatch.context() as patched:
        patched.setattr(joint._JointTrace, "trace", kept)
        Tracing().check(lambda: Caches(4, choose), needs_grad=False)  # type: ignore[arg-type,return-value]
    return graphs


@pytest.mark.parametrize("choose", [own, of_the_last])
def test_the_graph_is_that_without_copies(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied,) = graphs_of(choose, monkeypatch)
    monkeypatch.setattr(joint, "repeated_classes", lambda state: frozenset())
    (plain,) = graphs_of(choose, monkeypatch)
    assert copied == plain


def test_each_actor_writes_to_its_own_caches(traces: Counter[str]) -> None:
    step = Tracing()
    for _ in range(3):
        step.check(lambda: Caches(3, own), needs_grad=False)  # type: ignore[arg-type,return-value]
    assert traces["traces"] == 1


@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_copies_where_a_gradient_passes(needs_grad: bool, traces: Counter[str]) -> None:
    class Detached(Caches):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                with torch.no_grad():
                    layer(x, *own(self, index))
                x = x + self.cache(index)[:3] * layer.linear(x)  # type: ignore[operator,union-attr]
            return x

    def build() -> Caches:
        return Detached(3, own, trains=True)

    Tracing().check(build, needs_grad=needs_grad)  # type: ignore[arg-type]


def test_a_copy_that_writes_to_what_autograd_has_saved() -> None:
    class Saved(Caches):
        def forward(self, x: Tensor) -> Tensor:
            kept = x * self.cache(2)[:3]
            with torch.no_grad():
                for index, layer in enumerate(self.layers):
                    layer(x * 1, *own(self, index))
            return kept

    with pytest.raises(TraceError, match="modified by an inplace operation"):
        Tracing().check(lambda: Saved(3, own))  # type: ignore[arg-type,return-value]


def test_a_layer_that_writes_to_what_the_step_gave(traces: Counter[str]) -> None:
    class Given(Caches):
        def forward(self, x: Tensor) -> Tensor:
            out = x * 2
            for index, layer in enumerate(self.layers):
                out = layer(out, x if index == 2 else x * 0, self.cache(0))
            return out

    with pytest.raises(TraceError, match=r"writes in place to .*index_copy_"):
        Tracing().check(lambda: Given(3, own), needs_grad=False)  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class Use:
    """What a layer does: the caches that it writes to and reads from, and a number of its own."""

    write: int
    read: int
    mark: float
    ahead: bool  # whether the method writes to the cache ahead of the layer


USES = st.builds(
    Use, st.integers(0, 4), st.integers(0, 4), st.sampled_from([0.0, 0.0, 2.0]), st.booleans()
)


class Drawn(Caches):
    """Layers with uses that a search draws."""

    def __init__(self, uses: Sequence[Use]) -> None:
        super().__init__(5, own)
        self.uses = tuple(uses)
        for layer, use in zip(self.layers, uses, strict=False):
            layer.mark = use.mark  # type: ignore[assignment]

    def caches(self) -> list[Tensor]:
        return [self.cache(0), self.cache(1), self.cache(2), self.wide[:6], self.wide[4:10]]

    def forward(self, x: Tensor) -> Tensor:
        for layer, use in zip(self.layers, self.uses, strict=False):
            caches = self.caches()
            if use.ahead:
                caches[use.write].mul_(0.5)
            x = layer(x, caches[use.write], caches[use.read])
        return x + self.cache(0)[:3] + self.wide[3:6]


@examples(60)
@given(st.lists(USES, min_size=2, max_size=5))
def test_random_uses_of_caches(uses: list[Use]) -> None:
    """Values and caches are those of plain Python, whichever layers share what."""
    Tracing().check(lambda: Drawn(uses), needs_grad=False)  # type: ignore[arg-type,return-value]
