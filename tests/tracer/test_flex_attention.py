"""`flex_attention` and `varlen_attn` in traced methods: values, gradients and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.method.attention import flex_operators
from cg.tracer.method.attention.modifications import (
    WHOLE_RUNS,
    RankRuns,
    aligned_dimensions,
    joint_text,
    modification,
    recorded,
)

BATCH, HEADS, GROUPS, ROWS, KEYS, WIDTH, WIDE = 2, 4, 2, 5, 7, 4, 6
Attend = Callable[[Any], Any]


class Operands(nn.Module):
    """Queries, keys and values, a bias for each head and pair, and documents of keys.

    Args:
        attend: takes this, and gives what the loss is of.
        rows_of_keys: how many rows of the batch keys and values have.
        dtype: of all.
    """

    def __init__(
        self, attend: Attend, rows_of_keys: int = BATCH, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.q = nn.Parameter(torch.randn(BATCH, HEADS, ROWS, WIDTH, dtype=dtype))
        self.k = nn.Parameter(torch.randn(rows_of_keys, GROUPS, KEYS, WIDTH, dtype=dtype))
        self.v = nn.Parameter(torch.randn(rows_of_keys, GROUPS, KEYS, WIDE, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(HEADS, 3, dtype=dtype))
        self.temperature = nn.Parameter(torch.ones(1, dtype=dtype))
        self.register_buffer("documents", torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 4 + [1] * 3]))

    def loss(self) -> Tensor:
        parts = self.attend(self)
        parts = parts if isinstance(parts, tuple) else (parts,)
        terms = [(part * torch.arange(part.numel()).view(part.shape).cos()).sum() for part in parts]
        return torch.stack(terms).sum()

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]


def trained(attend: Attend, **options: Any) -> list[Tensor | None]:
    """The loss of a traced method, and its gradients."""
    with use_world(VirtualWorld(1)):
        actor = cg.actor(Operands).on(0)(attend, **options)

        @cg.trace
        def step() -> Any:
            loss = actor.loss()
            cg.backward(loss)
            return loss

        return [step().clone(), *actor.gradients()]


def alone(attend: Attend, **options: Any) -> list[Tensor | None]:
    plain = Operands(attend, **options)
    loss = plain.loss()
    loss.backward()
    return [loss.detach(), *plain.gradients()]


def assert_alike(own: Sequence[Tensor | None], plain: Sequence[Tensor | None]) -> None:
    for one, other in zip(own, plain, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def formula(x: Any, bias: bool = True, mask: bool = True) -> tuple[Tensor, Tensor]:
    """The result, and the logarithms of sums, which torch's function has no derivative of here."""
    k, v = (t.expand(BATCH, *t.shape[1:]).repeat_interleave(2, 1) for t in (x.k, x.v))
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    scores = x.q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    if bias:
        scores = scores + x.bias[:, (i - j).clamp(0, 2)] + x.temperature * (j - i)
    if mask:
        same = x.documents[:, :ROWS, None] == x.documents[:, None]
        scores = scores.masked_fill(~(same & (i >= j))[:, None], -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def by_flex(x: Any, bias: bool = True, mask: bool = True, call: Any = flex_attention) -> Any:
    documents, of_head, temperature = x.documents, x.bias, x.temperature

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + of_head[h, (i - j).clamp(0, 2)] + temperature[b * 0] * (j - i)

    blocks = create_block_mask(within, BATCH, None, ROWS, KEYS, device="cpu") if mask else None
    score = biased if bias else None
    out, aux = call(
        *(x.q, x.k, x.v, score, blocks), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_values_and_gradients_are_those_of_the_formula(bias: bool, mask: bool) -> None:
    own = trained(lambda x: by_flex(x, bias, mask), dtype=torch.float64)
    assert_alike(own, alone(lambda x: formula(x, bias, mask), dtype=torch.float64))


def test_values_are_those_of_torch() -> None:
    """Without gradients, torch's function runs on hosts."""

    def attend(x: Any) -> Any:
        return by_flex(SimpleNamespace(**{name: value.detach() for name, value in held(x)}))

    def held(x: Any) -> Iterator[tuple[str, Tensor]]:
        yield from x.named_parameters()
        yield from x.named_buffers()

    with use_world(VirtualWorld(1)):
        actor = cg.actor(Operands).on(0)(attend)
        step = cg.trace(lambda: actor.loss())
        assert torch.equal(step(), Operands(attend).loss())


def test_keys_of_one_row_serve_the_batch() -> None:
    options = {"rows_of_keys": 1, "dtype": torch.float64}
    assert_alike(trained(by_flex, **options), alone(formula, **options))


def test_what_torch_compile_has_made_is_looked_into() -> None:
    compiled = torch.compile(flex_attention)
    own = trained(lambda x: by_flex(x, call=compiled), dtype=torch.float64)
    assert_alike(own, alone(formula, dtype=torch.float64))


def test_autocast_casts_queries_keys_and_values() -> None:
    def attend(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return by_flex(x)[0]

    result = trained(attend)
    exact = alone(lambda x: formula(x)[0])
    assert result[1].dtype == torch.float32  # type: ignore[union-attr]
    torch.testing.assert_close(result[0], exact[0], rtol=0.05, atol=0.05)


def scored(function: Callable[..., Any]) -> Attend:
    return lambda x: flex_attention(x.q, x.k, x.v, function(x), enable_gqa=True)


class Doubled(torch.autograd.Function):
    """A function with a derivative in Python."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


OUTSIDE = torch.ones(HEADS)
REFUSED: dict[str, tuple[Attend, str]] = {
    "foreign": (scored(lambda x: lambda s, b, h, i, j: s + OUTSIDE[h]), "neither an argument"),
    "draws": (scored(lambda x: lambda s, b, h, i, j: s + torch.rand(())), "draws random numbers"),
    "writes": (scored(lambda x: lambda s, b, h, i, j: (s + 0).add_(1)), "writes in place"),
    "number": (scored(lambda x: lambda s, b, h, i, j: 1.0), "gives a float"),
    "value": (scored(lambda x: lambda s, b, h, i, j: s if i > j else -s), "Python condition"),
    "function": (scored(lambda x: lambda s, *indices: Doubled.apply(s)), r"Doubled, a torch\.auto"),
    "whole": (scored(lambda x: lambda s, *indices: s * x.temperature.sum()), "without an index"),
    "part": (scored(lambda x: lambda s, b, h, i, j: s + x.bias[h][j % 3]), "with 1 of 2 indices"),
    "unused": (scored(lambda x: lambda s, b, h, i, j: x.bias[h, j * 0]), "no score goes into"),
    "flash": (
        lambda x: flex_attention(
            *(x.q, x.k, x.v), enable_gqa=True, kernel_options={"BACKEND": "FLASH"}
        ),
        "in other units",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_text_cannot_say_is_refused(name: str) -> None:
    attend, message = REFUSED[name]
    with pytest.raises(cg.TraceError, match=message) as caught:
        trained(attend)
    assert caught.value.remedy
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__


def test_a_mask_has_no_gradient() -> None:
    def attend(x: Any) -> Any:
        slopes = x.bias
        mask = BlockMask.from_kv_blocks(
            torch.ones(1, 1, 1, dtype=torch.int32),
            torch.zeros(1, 1, 1, 1, dtype=torch.int32),
            mask_mod=lambda b, h, i, j: slopes[h, j * 0] > 0,
            seq_lengths=(ROWS, KEYS),
        )
        return flex_attention(x.q, x.k, x.v, block_mask=mask, enable_gqa=True)

    with pytest.raises(cg.TraceError, match="mask_mod takes a tensor that requires a gradient"):
        trained(attend)


def test_a_scalar_is_trained_with_an_index() -> None:
    """The remedy of the refusal without one."""

    def attend(x: Any) -> Any:
        scalar = x.temperature
        return scored(lambda x: lambda s, b, h, i, j: s * 0 + s * scalar[b * 0])(x)

    def plain(x: Any) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.v))
        return (x.q @ k.transpose(-1, -2) / 2 * x.temperature).softmax(-1) @ v

    options = {"dtype": torch.float64}
    assert_alike(trained(attend, **options), alone(plain, **options))


def functions(mode: FakeTensorMode) -> tuple[Any, Any, Tensor]:
    with mode:
        bias, score = torch.zeros(HEADS, 3, requires_grad=True), torch.zeros((), requires_grad=True)
        documents = torch.zeros(BATCH, KEYS, dtype=torch.int64)
    biased = recorded(lambda s, b, h, i, j: s + bias[h, (i - j).clamp(0, 2)], score, mode)
    within = recorded(lambda b, h, i, j: documents[b, i] >= documents[b, j], None, mode)
    return biased, within, score


def test_dimensions_that_one_index_alone_indexes() -> None:
    biased, within, _ = functions(FakeTensorMode())
    lengths = (BATCH, HEADS, ROWS)
    assert aligned_dimensions(biased.text, True, biased.captured, lengths) == ((1, None),)
    assert aligned_dimensions(within.text, False, within.captured, lengths) == ((0, None),)
    assert aligned_dimensions(biased.text, True, biased.captured, (2, 2, 5)) == ((None, None),)


@pytest.mark.parametrize("runs", [((2, 4), (0, 1)), ((0, 1, 3, 4), (1, 2)), ((), (1, 2))])
def test_a_rank_computes_with_indices_of_the_whole(runs: tuple[tuple[int, ...], ...]) -> None:
    heads, batch = runs
    biased, within, _ = functions(FakeTensorMode())
    bias = torch.randn(HEADS, 3)
    documents = torch.randint(3, (BATCH, KEYS))
    rows, columns = (1, 3, 4, 5), (2, 6)
    own = [list(range(n)) for n in (BATCH, HEADS, ROWS, KEYS)]
    all_runs = (batch, heads, rows, columns)
    held = [
        [i for start, stop in zip(r[::2], r[1::2], strict=True) for i in range(start, stop)] or all_
        for r, all_ in zip(all_runs, own, strict=True)
    ]
    pieces = (bias[held[1]], documents[held[0]])
    ranks = [
        RankRuns(all_runs, ((len(held[1]), 3),), ((1, None),)),
        RankRuns(all_runs, ((len(held[0]), KEYS),), ((0, None),)),
    ]
    for local_b, b in enumerate(held[0]):
        for local_h, h in enumerate(held[1]):
            for local_i, i in enumerate(held[2]):
                for local_j, j in enumerate(held[3]):
                    local = [*map(torch.tensor, (local_b, local_h, local_i, local_j))]
                    score = modification(biased.text, True, ranks[0])
                    one = score(torch.tensor(0.0), *local, pieces[0])
                    assert one == bias[h, min(max(i - j, 0), 2)]
                    mask = modification(within.text, False, ranks[1])
                    assert mask(*local, pieces[1]) == (documents[b, i] >= documents[b, j])


def test_fused_forms_are_torch_operators_that_compute_the_same() -> None:
    """On GPUs, TorchInductor makes its kernel of them."""
    biased, within, score = functions(FakeTensorMode())
    options = '{"BACKEND": "AUTO", "OUTPUT_LOGSUMEXP": true, "OUTPUT_MAX": false}'
    torch_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1, 1, device="cpu")
    form = flex_operators.FlexForm(
        *(biased.text, joint_text(biased, score, [True]), within.text, 0.5, options),
        *((1, 1), flex_operators.ONE_BLOCK, len(torch_mask.as_tuple()) - 13),
        *(((1, None),), ((0, None),)),
    ).text
    x = Operands(by_flex).requires_grad_(False)
    others = ([x.bias], [x.documents], [], form)
    out, logsumexp, largest = flex_operators.FLEX_ATTENTION(x.q, x.k, x.v, *others, *WHOLE_RUNS)
    fused = make_fx(
        lambda q, k, v, bias, documents: flex_operators._fused_forward(
            q, k, v, [bias], [documents], [], form, *WHOLE_RUNS
        )
    )(x.q, x.k, x.v, x.bias, x.documents)
    assert [n.name for n in fused.graph.nodes if n.name == "flex_attention"]
    for one, other in zip(
        fused(x.q, x.k, x.v, x.bias, x.documents), (out, logsumexp, largest), strict=True
    ):
        assert torch.equal(one, other)
    gradient, bias = torch.randn_like(out), x.bias.detach().requires_grad_()
    operands = (gradient, None, x.q, x.k, x.v, out, logsumexp, [bias], [x.documents], [], form)
    own = flex_operators.FLEX_ATTENTION_BACKWARD(*operands, [True], *WHOLE_RUNS)
    others = flex_operators._fused_backward(*operands, [True], *WHOLE_RUNS)
    for one, other in zip(own, others, strict=True):
        assert torch.equal(one, other)


class Packed(nn.Module):
    """Attention of tokens in documents, with trained projections."""

    def __init__(self, window: tuple[int, int], longest: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(8, 24).double()
        self.window, self.longest = window, longest

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (2, 4)) for part in self.projection(x).chunk(3, -1))

    def loss(self, x: Tensor, borders: Tensor) -> Tensor:
        longest = x.shape[0] if self.longest is None else self.longest(borders)
        out = varlen_attn(
            *self.parts(x), borders, borders, longest, longest, window_size=self.window
        )
        assert isinstance(out, Tensor)
        return (out.flatten(1) * x).sum()

    def by_document(self, x: Tensor, borders: Tensor) -> Tensor:
        total = x.new_zeros(())
        left, right = (10**6 if size < 0 else size for size in self.window)
        for start, stop in zip(borders.tolist(), borders.tolist()[1:], strict=False):
            i, j = torch.arange(stop - start)[:, None], torch.arange(stop - start)
            q, k, v = (part.transpose(0, 1) for part in self.parts(x[start:stop]))
            scores = (q @ k.transpose(-1, -2) / 2).masked_fill(
                (i - j > left) | (j - i > right), -math.inf
            )
            out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            total = total + (out * x[start:stop]).sum()
        return total

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]


X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).double()
BORDERS = torch.tensor([0, 4, 7, 8, 8, 8], dtype=torch.int32)
"""Of three documents in at most five; the last token is in none."""


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("window", [(-1, 0), (2, 1)])
def test_documents_are_as_each_by_itself(window: tuple[int, int], ranks: int) -> None:
    with use_world(VirtualWorld(3)):
        plan = {"loss(x)": cg.cut(0, "cp")}
        place = cg.mesh(cp=ranks)
        actor = cg.actor(Packed).on(place, plan=plan)(window)

        @cg.trace
        def step(x: Tensor, borders: Tensor) -> Any:
            loss = actor.loss(x, borders)
            cg.backward(loss)
            return loss, actor.gradients()

        loss, gradients = step(X, BORDERS)
        plain = Packed(window)
        expected = plain.by_document(X, BORDERS)
        expected.backward()
        own = [loss.cpu(), *(gradient.cpu() for gradient in gradients)]
        assert_alike(own, [expected.detach(), *plain.gradients()])


def test_a_longest_document_is_a_static_number() -> None:
    for longest, message in (
        (lambda borders: borders.diff().max(), "max_q of varlen_attn is a tensor"),
        (lambda borders: int(borders.diff().max()), r"int\(tensor\) needs the value"),
    ):
        with use_world(VirtualWorld(1)):
            actor = cg.actor(Packed).on(0)((-1, 0), longest)
            step = cg.trace(lambda x, borders, actor=actor: actor.loss(x, borders))
            with pytest.raises(cg.TraceError, match=message) as caught:
                step(X, BORDERS)
            assert "such as the number of tokens" in caught.value.remedy
