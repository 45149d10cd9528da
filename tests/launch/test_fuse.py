"""Steps whose graphs are compiled as a whole give the values of those whose graphs are not."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.fusion import fuse
from cg.ir.attributes import Effect
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.tracer.graph.autodiff.products import ADD_PRODUCT
from tests.backends.memory import peak_of

from ..worlds import virtual_world

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for TorchInductor"
)
M, WIDTH = 2, 8

_world = virtual_world(2)


@pytest.fixture
def as_is(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """A compiler called `graph`, which runs the graph; the graphs that it is given."""
    given: list[torch.fx.GraphModule] = []

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        given.append(module)
        return lambda values: module(*values)

    monkeypatch.setitem(fuse.FUSERS, "graph", lambda: compiler)
    return given


@cg.actor
class BatchNormStage(nn.Module):
    """Two products around a batch norm and dropout."""

    def __init__(self, seed: int, drops: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.other = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drops = drops
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.one(x)))
        hidden = nn.functional.dropout(hidden, self.drops) if self.drops else hidden
        return self.other(hidden) * self.scale

    def loss(self, x: Tensor) -> Tensor:
        return (x**2).mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def training(stages: list[Any]) -> Any:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for h in cg.microbatches(x, M):
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return step.lower(X)


X = torch.randn(4 * M, WIDTH, generator=torch.Generator().manual_seed(0))


def trained(drops: float = 0.0, steps: int = 3, **options: Any) -> tuple[Any, list[Tensor], Any]:
    """The compiled step, its losses, and what the actors hold behind them."""
    stages = [BatchNormStage.on(rank)(rank, drops) for rank in range(2)]
    compiled = training(stages).compile(seed=3, **options)
    losses = [compiled(X) for _ in range(steps)]
    held = [copy.deepcopy(stage.state_dict()) for stage in stages]
    return compiled, losses, held


def of_actors(compiled: Any) -> dict[str, str]:
    return {name: why for name, why in compiled.fused.items() if name.startswith("batchnormstage")}


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.timeout(300)
def test_training_by_inductor() -> None:
    schedule = cg.schedules.zb_h2()
    _, right, held = trained(schedule=schedule)
    compiled, losses, found = trained(schedule=schedule, fuse="inductor")
    assert_close(losses, right)
    assert_close(found, held)
    of_stages = of_actors(compiled)
    compiled_ones = [name for name, why in of_stages.items() if not why]
    assert {name.rpartition(".")[2] for name in compiled_ones} >= {"forward", "input", "weight"}
    assert {why for name, why in of_stages.items() if "update" in name} == {"it is opaque"}


@needs_compiler
@pytest.mark.timeout(300)
def test_what_draws_random_numbers_draws_the_same() -> None:
    _, right, held = trained(0.5, steps=1)
    compiled, losses, found = trained(0.5, steps=1, fuse="inductor")
    assert_close(found, held)
    assert_close(losses, right)
    reasons = {name.partition(".")[2]: why for name, why in of_actors(compiled).items()}
    assert reasons["forward.vjp.forward"] == "it draws random numbers"
    assert reasons["forward.vjp.backward"] == ""


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_are_added_up_in_products(name: str, as_is: list[torch.fx.GraphModule]) -> None:
    schedule = cg.schedules.by_name(name)
    _, right, held = trained(schedule=schedule)
    _, losses, found = trained(schedule=schedule, fuse="graph")
    assert_close(losses, right)
    assert_close(found, held)
    # Of 9 products 4 are gradients of weights; the first stage has no cotangent of its input.
    ops = [n.target for graph in as_is for n in graph.graph.nodes]
    assert ops.count(torch.ops.aten.mm.default) == 5


def test_products_are_added_as_soon_as_their_factors_are_there(
    as_is: list[torch.fx.GraphModule],
) -> None:
    """So that the graph holds none of the factors to its end, and gives none."""
    layer = Gated.on(0)()

    compiled = lowered_mean(layer).compile(fuse="graph")
    backward = as_is[-1].graph
    order = {node: at for at, node in enumerate(backward.nodes)}
    adds = [node for node in order if node.target is ADD_PRODUCT]
    numbers = [int(attrgetter(node.args[2].target)(as_is[-1])) for node in adds]
    assert numbers == sorted(numbers)[::-1]
    for node in adds:
        ready = max(order[factor] for factor in node.args[:2])
        products = [n for n in order if n.target is torch.ops.aten.mm.default]
        assert not any(ready < order[n] < order[node] for n in products)
    assert set(backward.output_node().all_input_nodes) == set(adds)
    for _ in range(2):
        compiled(GIVEN)
    found = [p.grad for p in layer.local.parameters()]
    layer.local.zero_grad()
    for _ in range(2):
        layer.local.mean(GIVEN).backward()
    assert_close(found, [p.grad for p in layer.local.parameters()])


def test_kernels_that_are_made_ahead(as_is: list[torch.fx.GraphModule]) -> None:
    """The graph has them, and its compilation makes no others."""
    layer = Gated.on(0)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        result: Tensor = layer.forward(x)
        return result

    with torch.no_grad():
        lowered = step.lower(GIVEN)
        thread = threading.Thread(target=lambda: lowered.fuse_ahead("graph", max_inflight=2))
        thread.start()
        thread.join()
        made = list(as_is)
        assert len(made) == 1
        with lowered.compile(fuse="graph", max_inflight=2) as compiled:
            assert as_is == made
            assert list(compiled.fused.values()) == [""]
            assert_close(compiled.execute(GIVEN).result(), layer.local(GIVEN))


def test_kernels_of_a_backward_are_not_made_ahead(as_is: list[torch.fx.GraphModule]) -> None:
    stages = [BatchNormStage.on(rank)(rank) for rank in range(2)]
    with pytest.raises(ValueError, match="has a backward: compile"):
        training(stages).fuse_ahead("graph")
    assert not as_is


def test_a_step_is_as_before_without() -> None:
    compiled, _, _ = trained(steps=1)
    assert compiled.fused == {}
    assert "fuse" not in format_module(compiled.module)


def test_products_add_up_by_themselves() -> None:
    adding, right, held = trained()
    plain, losses, found = trained(passes="-fuse-accumulation")
    assert_close(losses, right)
    assert_close(found, held)
    backwards = [f for f in adding.module.functions.values() if f.adds_products]
    assert {f.effect for f in backwards} == {Effect.ACCUMULATE}
    assert "adds_products = true" in format_module(adding.module)
    assert "adds_products" not in format_module(plain.module)


def test_without_it_gradients_have_the_bits_of_autograd() -> None:
    """The optimizer clears gradients, so what the actors hold are sums over microbatches."""
    _, _, found = trained(passes="-fuse-accumulation", schedule=cg.schedules.gpipe())
    stages = [BatchNormStage.on(rank)(rank, 0.0) for rank in range(2)]
    for _ in range(3):
        losses = []
        for h in X.chunk(M):
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h))
        torch.stack(losses).mean().backward()
        for stage in stages:
            stage.update()
    for stage, held in zip(stages, found, strict=True):
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, held[name]), name


def test_the_plan_says_what_is_compiled(as_is: list[torch.fx.GraphModule], tmp_path: Path) -> None:
    compiled, _, _ = trained(0.5, steps=1, fuse="graph", dump=tmp_path)
    text = format_module(compiled.module)
    assert "fuse = graph" in text
    assert format_module(parse_module(text)) == text
    (file,) = tmp_path.glob("*.fused.txt")
    lines = file.read_text().splitlines()
    assert any(line.endswith(": compiled") for line in lines)
    assert any(line.endswith(": runs as it is: it draws random numbers") for line in lines)
    off, _, _ = trained(steps=1, fuse="graph", passes="-fuse")
    assert set(off.fused.values()) >= {"nothing asks for it", "it is opaque"}
    assert "" not in off.fused.values()


def test_graphs_are_compiled_once_for_all_schedules(as_is: list[torch.fx.GraphModule]) -> None:
    lowered = training([BatchNormStage.on(rank)(rank) for rank in range(2)])
    lowered.compile(schedule=cg.schedules.gpipe(), fuse="graph")
    count = len(as_is)
    lowered.compile(schedule=cg.schedules.one_f_one_b(), fuse="graph")
    assert len(as_is) == count > 0


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        raise NotImplementedError("no such operator\nand more")

    monkeypatch.setitem(fuse.FUSERS, "picky", lambda: compiler)
    _, right, held = trained()
    compiled, losses, found = trained(fuse="picky")
    assert torch.equal(torch.stack(losses), torch.stack(right))
    torch.testing.assert_close(found, held, rtol=0, atol=0)
    why = "picky cannot compile it: NotImplementedError: no such operator"
    assert why in compiled.fused.values()
    assert "" not in compiled.fused.values()


def test_an_unknown_compiler() -> None:
    with pytest.raises(ValueError, match=r"fuse='nvfuser': there is no such.*'inductor', or None"):
        trained(fuse="nvfuser")


def _lacks(module: Any, examples: Any, options: Any) -> Any:
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        raise InvalidCxxCompiler
    except InvalidCxxCompiler as error:
        raise RuntimeError("while compiling") from error


@pytest.mark.parametrize(
    ("compile_", "says"),
    [
        ("torch._inductor.compile", "does not offer here.*Install a torch that has it"),
        ("torch._dynamo.utils.GmWrapper", "does not offer here.*Install a torch that has it"),
        (_lacks, r"rank 0: .*needs a C\+\+ compiler.*install g\+\+"),
    ],
)
def test_what_a_compiler_lacks(
    compile_: Callable[..., Any] | str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor as inductor

    if isinstance(compile_, str):
        monkeypatch.delattr(compile_)
    else:
        monkeypatch.setattr(inductor, "compile", compile_)
    with pytest.raises(cg.FuseError, match=says):
        trained(fuse="inductor")


@cg.actor
class Gated(nn.Module):
    """The feed-forward network of a Llama, behind a cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def mean(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()

    @cg.opaque
    def note(self) -> None:
        self.calls += 1


GIVEN = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


def lowered_mean(layer: Any) -> Any:
    """The step of a layer's mean and its gradients, for `GIVEN`."""

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = layer.mean(x)
        cg.backward(loss)
        return loss

    return step.lower(GIVEN)


def kept(compiled: Any) -> int:
    """Bytes that a rank's program holds at most."""
    return int(compiled.memory_analysis()[0].values)


@pytest.mark.usefixtures("as_is")
def test_less_is_kept_for_fused_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Gated.on(0)()

    lowered = lowered_mean(layer)
    plain, fused = lowered.compile(), lowered.compile(fuse="graph")
    found = []
    for compiled in (plain, fused, lowered.compile(fuse="graph", passes="-fuse")):
        loss = compiled(GIVEN)
        found.append([loss, *(p.grad for p in layer.local.parameters())])
        layer.local.zero_grad()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    # The activation is not kept: 16 rows of 32 numbers of 4 bytes.
    assert kept(plain) - kept(fused) == 16 * 4 * WIDTH * 4
    assert kept(compiled) == kept(plain)  # nothing is fused, so nothing is computed again


@pytest.mark.usefixtures("as_is")
def test_every_signature_is_traced_for_fused_backwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layer = Gated.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        print("traced")
        loss: Tensor = layer.mean(x)
        cg.backward(loss)
        return loss

    lowered = step.lower_many([GIVEN, GIVEN[:4]])
    plain = [plan.values for plan in lowered.compile().memory_analysis()]
    once = capsys.readouterr().out
    fused = lowered.compile(fuse="graph")
    assert capsys.readouterr().out == once != ""
    lowered.compile(fuse="graph")
    assert capsys.readouterr().out == ""  # what was traced for a compiler serves again
    assert fused.memory_analysis()[0].values < plain[0]
    for x in (GIVEN, GIVEN[:4]):
        assert_close(fused(x), layer.local.mean(x).detach())


@pytest.mark.usefixtures("as_is")
def test_a_step_without_a_backward_is_traced_no_second_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layer = Gated.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        print("traced")
        return layer.forward(x)

    lowered = step.lower(GIVEN)
    assert capsys.readouterr().out
    lowered.compile(fuse="graph")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("as_is")
def test_it_is_traced_for_a_compiler_under_the_modes_of_the_first_trace() -> None:
    layer = Gated.on(0)()
    layer.local.double()
    x = GIVEN.double()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = layer.mean(x * torch.ones(WIDTH))
        cg.backward(loss)
        return loss

    torch.set_default_dtype(torch.float64)
    try:
        lowered = step.lower(x)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        fused = lowered.compile(fuse="graph")
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(cg.InputError, match="default dtype"):
        fused(x)


@pytest.mark.usefixtures("as_is")
def test_a_backward_reads_no_more_of_an_actor_that_may_have_changed() -> None:
    layer = Gated.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = layer.mean(x)
        layer.note()
        cg.backward(loss)
        return loss

    lowered = step.lower(GIVEN)
    assert kept(lowered.compile(fuse="graph")) == kept(lowered.compile())


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """A compiler called `last`; for each call, which of its inputs are alive at its end."""
    found: list[list[bool]] = []

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        def run(values: list[Tensor]) -> Any:
            refs = [*map(weakref.ref, values)]
            results = torch.fx.Interpreter(module).boxed_run(values)
            found.append([ref() is not None for ref in refs])
            return results

        return run

    monkeypatch.setitem(fuse.FUSERS, "last", lambda: compiler)
    return found


def test_a_fused_backward_lets_go_of_what_is_saved(alive: list[list[bool]]) -> None:
    layer = Gated.on(0)()

    compiled = lowered_mean(layer).compile(fuse="last")
    for _ in range(2):
        compiled(GIVEN)
    forward, backward = alive[-2:]
    assert all(forward)  # the actor's, and the caller's
    # A weight, the caller's input, what is saved, and the constant 1.0 that a backward begins with.
    assert backward == [True, True, *([False] * 4), True]
    found = [p.grad for p in layer.local.parameters()]
    layer.local.zero_grad()
    for _ in range(2):
        layer.local.mean(GIVEN).backward()
    assert_close(found, [p.grad for p in layer.local.parameters()])


@cg.actor
class Tower(nn.Module):
    """Layers in a row; their gradients are new in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def mean(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()

    def update(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


@needs_compiler
def test_fused_kernels_hold_less_where_values_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Tower.on(0)()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss: Tensor = tower.mean(x)
        cg.backward(loss)
        tower.update()
        return loss

    x = torch.randn(128, 64)
    lowered = step.lower(x)

    def peak() -> int:
        compiled = lowered.compile(fuse="inductor")
        # The actor has a number, which other tests of the process may have used.
        fused = {name.partition(".")[2]: why for name, why in compiled.fused.items()}
        assert fused["mean.vjp.backward"] == ""
        compiled(x)
        return peak_of(lambda: compiled(x))

    boxed = peak()
    monkeypatch.setattr("cg.backends.program.binder.given_away", lambda *_: ())
    held = peak()
    # Gradients come while what is saved goes, so that there are never all of both.
    weight = 64 * 64 * 4
    assert held - boxed >= 3 * weight


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_training_with_values_let_go(name: str, alive: list[list[bool]]) -> None:
    schedule = cg.schedules.by_name(name)
    _, right, held = trained(schedule=schedule)
    _, losses, found = trained(schedule=schedule, fuse="last")
    assert_close(losses, right)
    assert_close(found, held)
    assert sum(not all(each) for each in alive) > len(alive) // 3


def test_a_backward_that_fails_leaves_gradients_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails = [False]

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        def run(values: list[Tensor]) -> Any:
            given = [*values]
            values.clear()
            if fails[0] and any(n.target is ADD_PRODUCT for n in module.graph.nodes):
                raise ArithmeticError("in the middle")
            return module(*given)

        return run

    monkeypatch.setitem(fuse.FUSERS, "failing", lambda: compiler)
    layer = Gated.on(0)()

    compiled = lowered_mean(layer).compile(fuse="failing")
    first = compiled(GIVEN)
    before = [torch.clone(p.grad) for p in layer.local.parameters()]
    fails[0] = True
    with pytest.raises(cg.RemoteError, match="in the middle"):
        compiled(GIVEN)
    assert_close([p.grad for p in layer.local.parameters()], before)
    fails[0] = False
    assert_close(compiled(GIVEN), first)
    assert_close([p.grad for p in layer.local.parameters()], [2 * each for each in before])
