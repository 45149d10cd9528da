"""Functions of a program run once before messages are under way, as they will run later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cg
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.devices.warm import warm
from cg.backends.program.linked import LinkedProgram
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.codegen.bodies import FusedBody

from ..memory import peak_of
from .fakes import FakeDevice
from .ranks import pause

BATCH, LENGTH, HEADS, WIDTH = 4, 6, 2, 16
SIDE = 64


@cg.actor
class Attention(torch.nn.Module):
    """Its backward views what attention has saved, which is not laid out as its shape says."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Parameter(torch.eye(WIDTH))
        self.out = torch.nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        heads = (x @ self.into).view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH) @ self.out

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Noting:
    """A body that notes when it runs."""

    def __init__(self, name: str, body: Any, ran: list[str]) -> None:
        self._name = name
        self._body = body
        self._ran = ran
        # Attributes of its own, by which it is a `GraphBody` on every version of Python.
        self.run, self.locate, self.graph = self.__call__, body.locate, body.graph
        self.state, self.trained, self.rebinds = body.state, body.trained, body.rebinds
        self.new_gradients, self.locations = body.new_gradients, body.locations

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        self._ran.append(self._name)
        return self._body(*inputs)  # type: ignore[no-any-return]


def warmed() -> tuple[dict[str, str], list[str], Attention]:
    """The functions that are left out on rank 0, those that have run, and the actor."""
    with use_world(VirtualWorld(2)):
        first, last = Attention.on(0)(), Attention.on(1)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            losses = [last.loss(first.forward(part)) for part in cg.microbatches(x, 2)]
            loss = cg.mean(losses)
            cg.backward(loss)
            return loss

        lowered = step.lower(torch.ones(BATCH, LENGTH, WIDTH))
        module = lowered.compile(schedule=cg.schedules.by_name("zb-h1")).module
        ran: list[str] = []
        bodies = {n: Noting(n, body, ran) for n, body in lowered.trace.bodies.items()}
        linked = LinkedProgram(module, 0, bodies, lowered.trace.constants)
        return warm(linked, FakeDevice()), ran, first.local


def test_functions_run_on_what_others_make() -> None:
    left_out, ran, _ = warmed()
    assert left_out == {}
    kinds = [name.rpartition(".")[2] for name in dict.fromkeys(ran)]
    assert {"forward", "backward"} <= set(kinds), ran
    # Where gradients are added, a second time is needed.
    assert all(ran.count(name) <= 2 for name in ran)


def test_state_and_gradients_are_put_back() -> None:
    _, _, actor = warmed()
    assert actor.count.item() == 0
    assert actor.into.grad is None
    assert torch.equal(actor.out, torch.eye(WIDTH))


@cg.actor
class Lookup:
    """Computes indices of what comes from elsewhere: all of them are -1 where that is 0."""

    def __init__(self) -> None:
        self.table = torch.arange(12.0).view(6, 2)

    def forward(self, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        last = length - 1
        table = self.table.to(ids.device)
        picked = torch.nn.functional.embedding(ids - 1, table).gather(1, last[:, :, None])
        rows = table.index_select(0, last[:, 0] - 6) + table.scatter(0, last, 1.0)[:4]
        put = table.clone().index_put((ids[0, :4] - 9,), picked[:, 0])
        masked = put.index_put((ids[0] > 0, last[0, 0]), torch.ones(()).to(ids.device))
        return put[last[:, 0]] + rows + masked.sum()


def test_indices_that_are_computed_of_made_up_numbers_are_in_range() -> None:
    with use_world(VirtualWorld(1)):
        lookup = Lookup.on(0)()
        step = cg.trace(lambda ids, length: lookup.forward(ids, length))
        ids, length = torch.arange(1, 5)[:, None].repeat(1, 6), torch.ones(4, 1, dtype=torch.int64)
        lowered = step.lower(ids, length)
        module = lowered.compile().module
        (body,) = (body for name, body in lowered.trace.bodies.items() if "forward" in name)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            body(torch.zeros_like(ids), torch.zeros_like(length))
        linked = LinkedProgram(module, 0, lowered.trace.bodies, lowered.trace.constants)
        assert warm(linked, FakeDevice()) == {}


@cg.actor
class Tower(torch.nn.Module):
    """Layers in a row, whose weights are as large as what is saved of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(6))

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def boxed(module: torch.fx.GraphModule, examples: Any) -> Any:
    """Computes a graph, and lets go of each value after its last use."""
    return lambda values: torch.fx.Interpreter(module).boxed_run(values)


def test_a_second_time_gradients_are_added_to_those_that_are_there() -> None:
    """Those have the layout that the program gives them, and so have operands that are gone."""
    found: list[tuple[list[Any], list[Any]]] = []

    class Seen(FusedBody):
        @property
        def run_boxed(self) -> Any:
            run = super().run_boxed

            def boxed(inputs: list[Any]) -> Any:
                gradients = [each.grad for each in self.trained()]
                found.append(([(x.shape, x.stride()) for x in inputs], gradients))
                outputs = run(inputs)
                assert inputs == []
                return outputs

            return boxed

    with use_world(VirtualWorld(1)):
        tower = Tower.on(0)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = tower.mean(x)
            cg.backward(loss)
            return loss

        lowered = step.lower(torch.ones(SIDE, SIDE))
        bodies = {
            name: Seen(**vars(body.refit(boxed))) for name, body in lowered.trace.bodies.items()
        }
        linked = LinkedProgram(lowered.compile().module, 0, bodies, lowered.trace.constants)
        assert warm(linked, FakeDevice()) == {}
        parameters = [*tower.local.parameters()]
    (first, before), (second, existing) = [each for each in found if each[1]]
    assert first == second
    assert before == [None] * len(parameters)
    assert len({gradient.data_ptr() for gradient in existing}) == 1
    assert [(g.shape, g.stride()) for g in existing] == [(p.shape, p.stride()) for p in parameters]


def test_no_more_memory_is_taken_than_by_the_program() -> None:
    with use_world(VirtualWorld(1)):
        tower = Tower.on(0)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = tower.mean(x)
            cg.backward(loss)
            return loss

        x = torch.ones(SIDE, SIDE)
        lowered = step.lower(x)
        bodies = {name: body.refit(boxed) for name, body in lowered.trace.bodies.items()}
        module = lowered.compile().module
        linked = LinkedProgram(module, 0, bodies, lowered.trace.constants)
        executable = DeviceExecutable(linked, FakeDevice())
        program = peak_of(lambda: executable.run([x], pause))
        tower.local.zero_grad()
        rehearsal = peak_of(lambda: warm(linked, FakeDevice()))
        assert all(each.grad is None for each in tower.local.parameters())
    # A made up input, memory for gradients, and states of generators come to it; by no means all
    # that is saved beside all gradients.
    assert rehearsal - program < 3 * x.nbytes
