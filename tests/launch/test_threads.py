"""Steps that several threads use, and traces that are interrupted: weights stay what they were."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.runtime.step_lock import StepLock, lock_of
from cg.launch.world.world import use_world, world

from ..sampling import scale

torch.set_num_threads(1)


@cg.actor
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))

    def loss(self, h: Tensor) -> Tensor:
        return self.linear(h).square().mean()


@pytest.fixture
def layers() -> Iterator[list[Any]]:
    with use_world(VirtualWorld(2)):
        torch.manual_seed(0)
        yield [Layer.on(rank)() for rank in range(2)]  # type: ignore[attr-defined]


def make_step(layers: list[Any]) -> cg.Step:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for part in cg.microbatches(x, 2):
            h = part
            for layer in layers:
                h = layer.forward(h)
            losses.append(layers[-1].loss(h))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss.detach()

    return step


def assert_whole(layers: list[Any]) -> None:
    """The layers hold what they held: real tensors, in modules of their own classes."""
    for layer in layers:
        module = layer.local
        assert type(module) is Layer
        assert type(module.linear) is nn.Linear
        for tensor in (*module.parameters(), *module.buffers()):
            assert type(tensor) in (nn.Parameter, Tensor)
            assert torch.isfinite(tensor).all()


def in_threads(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [
            future.result(timeout=100) for future in [pool.submit(work, i) for i in range(count)]
        ]


def test_threads_that_trace_steps_of_the_same_actors(layers: list[Any]) -> None:
    x = torch.ones(4, 4)
    start = threading.Barrier(4)

    def work(index: int) -> float:
        step = make_step(layers)
        start.wait(30)
        return float(step.lower(x).compile()(x))

    assert len(set(in_threads(work))) == 1
    assert_whole(layers)
    assert [float(layer.local.calls) for layer in layers] == [8.0, 8.0]


def test_threads_that_call_one_step(layers: list[Any]) -> None:
    x = torch.ones(4, 4)
    step = make_step(layers)
    start = threading.Barrier(4)

    def work(index: int) -> list[float]:
        start.wait(30)
        return [float(step(x)) for _ in range(10)]

    assert len({loss for losses in in_threads(work) for loss in losses}) == 1
    assert_whole(layers)
    assert [float(layer.local.calls) for layer in layers] == [80.0, 80.0]


def test_a_thread_that_runs_a_step_while_another_traces(layers: list[Any]) -> None:
    x = torch.ones(4, 4)
    compiled = make_step(layers).lower(x).compile()
    expected = float(compiled(x))

    def work(index: int) -> float:
        if index % 2:
            return min(float(compiled(x)) for _ in range(20))
        return float(make_step(layers).lower(x).compile()(x))

    assert in_threads(work) == [expected] * 4
    assert_whole(layers)


def test_other_processes_have_threads_in_another_order() -> None:
    lock = StepLock(alone=False)
    with lock.held("first"), lock.held("first again"):

        def work(_: int) -> None:
            with lock.held("second"):
                pass

        with pytest.raises(RuntimeError, match="step 'second' is used while another thread of"):
            in_threads(work, 1)
    in_threads(work, 1)


def test_a_wait_for_another_thread_has_a_deadline(
    layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CG_TIMEOUT", "0.1")
    step = make_step(layers)
    lock = lock_of(world())

    def work(_: int) -> None:
        step.lower(torch.ones(4, 4))

    with (
        lock.held("slow"),
        pytest.raises(cg.StepTimeout, match=r"step 'step' has waited 0\.1 s for another thread"),
    ):
        in_threads(work, 1)


def test_an_execution_is_not_started_while_a_thread_traces(layers: list[Any]) -> None:
    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def graph(x: Tensor) -> Tensor:
        return layers[0].forward(x)

    x = torch.ones(4, 4)
    with graph.lower(x).compile() as compiled:
        with (
            lock_of(world()).held("other", tracing=True),
            pytest.raises(RuntimeError, match="while a step is being traced"),
        ):
            compiled.execute(x)
        compiled.execute(x).result()


TRACER = Path(cg.__file__).parent / "tracer"
PUTS_AWAY = tuple(
    str(TRACER / file)
    for file in (
        "values/heap/reach.py",
        "values/heap/snapshot.py",
        "method/purity/side_effects.py",
        "method/purity/watch.py",
        "values/actor_state.py",
    )
)
"""The files that put stand-ins in place and take them away. Ctrl-C in torch may end the program."""


class Interruption:
    """Raises `KeyboardInterrupt` at the n-th call of a function of these, as Ctrl-C may."""

    def __init__(self, at: int) -> None:
        self.calls = 0
        self._at = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PUTS_AWAY):
            self.calls += 1
            if self.calls == self._at:
                sys.setprofile(None)
                raise KeyboardInterrupt


def calls_of(run: Callable[[], Any]) -> int:
    counter = Interruption(-1)
    sys.setprofile(counter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counter.calls


def test_weights_are_restored_wherever_a_trace_is_interrupted(layers: list[Any]) -> None:
    x = torch.ones(4, 4)
    before = [tensor.clone() for layer in layers for tensor in layer.local.state_dict().values()]

    def run() -> None:
        make_step(layers).lower(x)

    assert all(Path(file).exists() for file in PUTS_AWAY)
    run()
    count = calls_of(run)
    assert count > 100
    # A trace makes some calls fewer than the one before, whose objects are gone.
    places = range(1, count * 98 // 100)
    for at in sorted(random.Random(0).sample(places, 12 if scale() == 1 else 50)):
        sys.setprofile(Interruption(at))
        try:
            with pytest.raises(KeyboardInterrupt):
                run()
        finally:
            sys.setprofile(None)
        assert_whole(layers)
    after = [tensor for layer in layers for tensor in layer.local.state_dict().values()]
    assert all(map(torch.equal, before, after))
