"""A mixture of experts over ranks: a router, a shared expert, and losses of balance, proven."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.attributes import Action
from cg.ir.ops import AllGatherRows, Collective, Op, ReduceScatterRows, RowCollective, Transfer
from cg.ir.ops.module import Module
from cg.ir.text.diagnostics import IRError
from cg.ir.types import TensorType
from cg.ir.verify.verifier import verify
from cg.launch.world.world import use_world
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

from ...sampling import scale

WIDTH, EXPERTS, CHOICES = 6, 4, 2


class Mixture(nn.Module):
    """Gives `[tokens, width]`, and has the gradients of the last update in `last`."""

    def __init__(self, seed: int, skewed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(WIDTH, EXPERTS)
        if skewed:  # two experts get all tokens, and the others none
            nn.init.constant_(self.router.bias[:CHOICES], 50.0)
        self.register_buffer("correction", torch.randn(EXPERTS) * 0.1)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.5)
        self.shared = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
        self.double()
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)

    def mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what balance costs: an auxiliary loss and a z-loss."""
        logits = self.router(x)
        scores = logits.softmax(-1)
        _, ids = (scores + self.correction).topk(CHOICES)
        shares = scores.gather(1, ids)
        gate, up = cg.expert_linear(x, self.up, ids).chunk(2, -1)
        h = cg.expert_linear(functional.silu(gate) * up, self.down, ids)
        h = (h * shares.unsqueeze(-1)).sum(1) + self.shared(x)
        counts = functional.one_hot(ids, EXPERTS).double().sum(1).mean(0)
        balance = (counts * scores.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
        return x + h, balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixed(x)

    def loss(self, x: Tensor, balance: Tensor, y: Tensor) -> Tensor:
        out, own = self.mixed(x)
        return functional.mse_loss(out, y) + 0.1 * (own + balance)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


EXPERT_CUTS = {"up|down": cg.cut(0, "ep")}
ARGUMENTS = "forward(x)|loss(x)|loss(y)"
MESHES: dict[str, tuple[int, dict[str, int], dict[str, Any], Any]] = {
    "pp 2, ep 2": (2, {"ep": 2}, {ARGUMENTS: cg.cut(0, "ep")}, None),
    "dp 2, ep 2": (1, {"dp": 2, "ep": 2}, {ARGUMENTS: cg.cut(0, "dp", "ep")}, None),
    "ep 2, tp 2": (
        1,
        {"ep": 2, "tp": 2},
        {
            ARGUMENTS: cg.cut(0, "ep"),
            "shared.0.*": cg.cut(0, "tp"),
            "shared.2.weight": cg.cut(1, "tp"),
        },
        None,
    ),
    "fsdp 2, ep 2": (
        1,
        {"dp": 2, "ep": 2},
        {ARGUMENTS: cg.cut(0, "dp", "ep")},
        cg.cut(0, "dp"),
    ),
    "ep 4, uneven tokens": (1, {"ep": 4}, {ARGUMENTS: cg.cut(0, "ep")}, None),
}


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    return x, y


def lowered(name: str, skewed: bool = False, rows: int = 12) -> Any:
    """A step of two microbatches, in one stage or two."""
    stages, axes, cuts, store = MESHES[name]
    size = 1
    for length in axes.values():
        size *= length
    places = [cg.mesh(range(i * size, (i + 1) * size), **axes) for i in range(stages)]
    options = {} if store is None else {"store": store}
    actor = cg.actor(Mixture)
    actors = [
        actor.on(place, plan=cuts | EXPERT_CUTS, **options)(seed, skewed)
        for seed, place in enumerate(places)
    ]

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part, target in cg.microbatches((x, y), 2):
            balance = 0.0
            for each in actors[:-1]:
                part, balance = each.forward(part)
            losses.append(actors[-1].loss(part, balance, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        for each in actors:
            each.update()
        return loss

    return step.lower(*batch(rows))


def plain_losses(stages: int, skewed: bool, rows: int = 12) -> list[Tensor]:
    models = [Mixture(seed, skewed) for seed in range(stages)]
    losses = []
    for _ in range(3):
        parts = []
        for part, target in zip(*(tensor.chunk(2) for tensor in batch(rows)), strict=True):
            balance: Any = 0.0
            for model in models[:-1]:
                part, balance = model(part)
            parts.append(models[-1].loss(part, balance, target))
        losses.append(torch.stack(parts).mean())
        losses[-1].backward()
        for model in models:
            model.update()
    return [loss.detach() for loss in losses]


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("skewed", [False, True], ids=["", "two experts get all tokens"])
def test_it_trains_as_one_process(name: str, skewed: bool) -> None:
    """The third loss has seen all gradients twice."""
    with use_world(VirtualWorld(4)):
        compiled = lowered(name, skewed).compile()
        losses = [compiled(*batch()) for _ in range(3)]
    torch.testing.assert_close(losses, plain_losses(MESHES[name][0], skewed), rtol=1e-9, atol=1e-9)


EVEN = [name for name in MESHES if "uneven" not in name]


@pytest.mark.parametrize("name", EVEN)
def test_an_exchange_of_rows_trains_as_one_process(name: str) -> None:
    """Rows that no rank needs do not travel; values and gradients are those of the whole batch."""
    with use_world(VirtualWorld(4)):
        compiled = lowered(name, name == EVEN[0], rows=16).compile(dispatch="exchange")
        moved = [op for op in ops_of(compiled.module) if isinstance(op, RowCollective)]
        losses = [compiled(*batch(16)) for _ in range(3)]
    assert {type(op) for op in moved} == {AllGatherRows, ReduceScatterRows}
    expected = plain_losses(MESHES[name][0], name == EVEN[0], rows=16)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


def test_the_exchange_of_a_backward_is_that_of_the_forward_the_other_way() -> None:
    """Of a stage, each microbatch gathers tokens and reduces them, and their gradients likewise."""
    with use_world(VirtualWorld(4)):
        module = lowered("pp 2, ep 2").trace.module
    names = [each.name for each in default_pipeline()]
    PassManager(default_pipeline()[: names.index("insert-transfers") + 1]).run(module)
    rows: dict[tuple[int, Action], list[bool]] = {}
    for op in module.program.ops:
        if isinstance(op, Transfer) and op.experts and op.lead == 1:
            type_ = op.operands[0].type
            assert op.task is not None
            assert isinstance(type_, TensorType)
            assert type_.layout is not None
            sums = rows.setdefault((op.task.stage, op.task.action), [])
            sums.append(bool(type_.layout.summands))
    both = [False, True] * 2  # a gather, then a reduction, in each of two microbatches
    assert rows.pop((0, Action.BACKWARD)) == [False] * 2, "nobody wants the gradient of the input"
    assert rows == {
        (0, Action.FORWARD): both,
        (1, Action.FORWARD): both,
        (1, Action.BACKWARD): both,
    }


def test_halves_of_a_gate_are_no_results_of_a_part() -> None:
    """They are views, which the part that reads them makes: another one would have to copy them."""
    with use_world(VirtualWorld(4)):
        functions = lowered("dp 2, ep 2").trace.module.functions
    first = [f for name, f in functions.items() if name.endswith(".backward.part0")]
    assert len(first) == 1
    shapes = [type_.shape[1:] for type_ in first[0].outputs if isinstance(type_, TensorType)]
    assert (CHOICES, WIDTH) not in shapes


def test_users_hear_which_form_each_stage_has(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In the log, and in a dump: why, and the bytes of both forms."""
    logged = {}
    for form in ("auto", "gather", "exchange"):
        caplog.clear()
        with use_world(VirtualWorld(4)), caplog.at_level(logging.INFO, "cg"):
            lowered("pp 2, ep 2", rows=16).compile(dispatch=form, dump=tmp_path / form)
        logged[form] = [record.getMessage() for record in caplog.records if record.name == "cg"]
        table = (tmp_path / form / "step.passes.txt").read_text()
        for line in logged[form]:
            assert line.removeprefix("step step: ") in table
    # Two microbatches gather 8 tokens, 4 from the other rank, of 6 numbers of 8 bytes. Of 4
    # experts a token has one of the other rank's 2 by 5 to 1.
    start = "step step: rows of experts in forward of stage 0: "
    assert f"{start}4 transfers, exchange: asked for; 160 of 192 bytes a rank" in logged["exchange"]
    for form, why in (("auto", "an exchange saves little"), ("gather", "asked for")):
        line = f"{start}4 transfers, gather: {why}; 192 bytes a rank, by exchange 160"
        assert line in logged[form]
    for lines in logged.values():
        assert {line.split(": ")[1] for line in lines} >= {
            f"rows of experts in {task}"
            for task in ("forward of stage 0", "forward of stage 1", "backward of stage 1")
        }


def ops_of(module: Module) -> Iterator[Op]:
    for program in module.programs:
        yield from program.ops


def test_uneven_tokens_are_not_exchanged() -> None:
    with use_world(VirtualWorld(4)), pytest.raises(cg.IRError, match="uneven pieces") as error:
        lowered("ep 4, uneven tokens").compile(dispatch="exchange")
    assert "use a batch that is a multiple of the ranks" in str(error.value)


def test_the_order_of_axes_that_cut_tokens() -> None:
    """Any order trains; where tokens do not divide, the error names the order that works."""
    place = {"dp": 2, "ep": 2}

    def losses(tokens: Any, rows: tuple[Tensor, Tensor]) -> list[Tensor]:
        with use_world(VirtualWorld(4)):
            plan = EXPERT_CUTS | {"loss(x)|loss(y)": tokens}
            actor = cg.actor(Mixture).on(cg.mesh(**place), plan=plan)(0)

            @cg.trace
            def step(x: Tensor, y: Tensor) -> Tensor:
                loss = actor.loss(x, 0.0, y)
                cg.backward(loss)
                actor.update()
                return loss

            return [step(*rows) for _ in range(3)]

    with pytest.raises(cg.LayoutError, match=r"cut along dp, but along ep\.dp") as error:
        losses(cg.cut(0, "ep", "dp"), batch(13))
    remedy = 'cut dimension 0 along ep last, in the plan and in arguments: cg.cut(0, "dp", "ep")'
    assert remedy in str(error.value)
    model, wanted, rows = Mixture(0), [], batch(16)
    for _ in range(3):
        wanted.append(model.loss(rows[0], torch.zeros(()).double(), rows[1]))
        wanted[-1].backward()
        model.update()
    for tokens in (cg.cut(0, "dp", "ep"), cg.cut(0, "ep", "dp")):
        torch.testing.assert_close(losses(tokens, rows), wanted, rtol=1e-9, atol=1e-9)


def removals(module: Module, kind: type[Op]) -> Iterator[None]:
    """Once for each op of a kind: the users of its results take an operand; then it is put back.

    What only transfers take is left out, since the next transfer reduces as well.
    """
    for op in [op for op in module.program.ops if isinstance(op, kind)]:
        users = [user for user in module.program.ops if set(op.results) & set(user.operands)]
        if all(isinstance(user, Transfer) for user in users):
            continue
        before = [user.operands for user in users]
        taken = dict(zip(op.results, op.operands * len(op.results), strict=False))
        for user in users:
            user.operands = tuple(taken.get(value, value) for value in user.operands)
        yield
        for user, operands in zip(users, before, strict=True):
            user.operands = operands


def test_whatever_travels_is_needed() -> None:
    """A program is refused from which a gather, a reduction or the adjoint of one is left out.

    A default run tries every fourth of them, and `--slow` all.
    """
    count, stride = 0, 1 if scale() > 1 else 4
    stages = ("insert-transfers", Transfer), ("lower-transfers", Collective)
    forms = [*((name, "gather") for name in MESHES), ("dp 2, ep 2", "exchange")]
    for name, form in forms:
        left = default_pipeline(dispatch=form)
        with use_world(VirtualWorld(4)):
            module = lowered(name, rows=12 if form == "gather" else 16).trace.module
        for last, kind in stages:
            end = 1 + [each.name for each in left].index(last)
            PassManager(left[:end]).run(module)
            left = left[end:]
            verify(module)
            for number, _ in enumerate(removals(module, kind)):
                if number % stride == 0:
                    with pytest.raises(IRError):
                        verify(module)
                    count += 1
            verify(module)
    assert count * stride >= 370
