"""Opaque methods work on pieces element by element, as on the whole, or are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import cg
from cg.ir.layout import Cut, Layout, Region
from cg.tracer.function.groups.pieces_only import as_in_one_process
from cg.tracer.graph.layouts.rules.pointwise import is_entrywise
from cg.tracer.sampled import until_next
from cg.tracer.values.pieces import PieceMemory, piece
from tests.sampling import examples

from ...worlds import virtual_world

Work = Callable[["Net"], Any]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

PLACES: dict[str, dict[str, Any]] = {
    "store": {"plan": {"loss(x)|loss(y)": cg.cut(0, "dp")}, "store": cg.cut(0, "dp")},
    "tp": {"plan": {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}},
}


@cg.actor
class Net(nn.Module):
    """Two layers, trained by an optimizer, or by a function of the net."""

    def __init__(self, work: Work | None = None, optimizer: MakeOptimizer | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)
        self.work = work
        self.kept: list[Tensor] = []
        if optimizer is not None:
            self.optimizer = optimizer(self.parameters())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.down(torch.relu(self.up(x))), y)

    @cg.opaque
    def update(self) -> None:
        if self.work is not None:
            self.work(self)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    @cg.opaque
    def look(self, x: Tensor) -> float:
        return float(x.mean())

    @cg.opaque
    def keep(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]

    @cg.opaque
    def measure(self) -> float:
        return sum(float(each.sum()) for each in self.kept)


def on(kind: str, **given: Any) -> Any:
    axis = "dp" if kind == "store" else "tp"
    return Net.on(cg.mesh(**{axis: 2}), **PLACES[kind])(**given)  # type: ignore[attr-defined]


def step_of(net: Any) -> Any:
    @cg.trace
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = net.loss(x, y)
        cg.backward(loss)
        net.update()
        return loss

    return train


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 4


_world = virtual_world(2)


def gradient(net: Net) -> Tensor:
    assert net.up.weight.grad is not None
    return net.up.weight.grad


def parameter(net: Net) -> Tensor:
    return net.up.weight


REFUSED: dict[str, tuple[Work, str]] = {
    "p.norm()": (lambda n: parameter(n).norm(), "linalg_vector_norm"),
    "p.data.norm()": (lambda n: parameter(n).data.norm(), "linalg_vector_norm"),
    "p.detach().norm()": (lambda n: parameter(n).detach().norm(), "linalg_vector_norm"),
    "p.grad.norm()": (lambda n: gradient(n).norm(), "linalg_vector_norm"),
    "p.grad.data.norm()": (lambda n: gradient(n).data.norm(), "linalg_vector_norm"),
    "vector_norm": (lambda n: torch.linalg.vector_norm(gradient(n)), "linalg_vector_norm"),
    "linalg.norm": (lambda n: torch.linalg.norm(parameter(n)), "linalg_vector_norm"),
    "foreach_norm": (lambda n: torch._foreach_norm([gradient(n)]), "_foreach_norm"),
    "get_total_norm": (lambda n: nn.utils.get_total_norm([gradient(n)]), "_foreach_norm"),
    "float().norm()": (lambda n: gradient(n).float().norm(), "linalg_vector_norm"),
    "(grad * 1.0).norm()": (lambda n: (gradient(n) * 1.0).norm(), "linalg_vector_norm"),
    "pow(2).sum().sqrt()": (lambda n: gradient(n).pow(2).sum().sqrt(), "sum"),
    "square().mean()": (lambda n: gradient(n).square().mean(), "mean"),
    "abs().max()": (lambda n: gradient(n).abs().max(), "max"),
    "std": (lambda n: parameter(n).std(), "std"),
    "mean": (lambda n: parameter(n).mean(), "mean"),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_other_elements_is_refused(what: str, kind: str) -> None:
    work, name = REFUSED[what]
    with pytest.raises(cg.RemoteError) as info:
        step_of(on(kind, work=work))(*data())
    text = str(info.value)
    assert f"takes {name} of a piece of a tensor that is cut over ranks" in text
    assert f"at {__file__}:" in text
    assert "Let a traced method compute what needs the whole tensor" in text


def refusal(work: Callable[[Tensor], Any], tensor: Tensor | None = None) -> str:
    """What a function is told that takes a piece; "" if it is not refused."""
    memory = PieceMemory()
    given = torch.arange(12.0).view(3, 4) if tensor is None else tensor
    memory.note(given, ROWS)
    try:
        with as_in_one_process(memory, "update"):
            work(given)
    except RuntimeError as error:
        return (
            str(error).partition(" of a piece")[0].removeprefix("the opaque method @update takes ")
        )
    return ""


ROWS = Layout((Cut(("dp",)), Cut()))
COLUMNS = Layout((Cut(), Cut(("dp",))))

ALSO_REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sum of a column": (lambda p: p.sum(0), "sum"),
    "matmul": (lambda p: p @ torch.ones(4, 2), "mm"),
    "transposed": (lambda p: p.t(), "t"),
    "flat": (lambda p: p.view(-1), "view"),
    "sort": (lambda p: p.sort(), "sort"),
    "cumsum": (lambda p: p.cumsum(0), "cumsum"),
    "row": (lambda p: p[0], "select"),
    "rows": (lambda p: p[:1].zero_(), "slice"),
    "masked entries": (lambda p: p[p > 0], "index"),
    "rows of a mask": (lambda p: p.__setitem__(torch.arange(3) > 0, 0.0), "index_put_"),
    "entries of a mask": (lambda p: p.__setitem__(p > 4, torch.ones(7)), "index_put_"),
    "iteration": (lambda p: list(p), "unbind"),
    "condition": (lambda p: bool((p > 0).all()), "all"),
    "equal": (lambda p: torch.equal(p, p), "equal"),
    "noise": (lambda p: torch.randn_like(p), "randn_like"),
    "noise in place": (lambda p: p.clone().normal_(), "normal_"),
    "own noise": (lambda p: p.normal_(generator=torch.Generator()), "normal_"),
    "softmax": (lambda p: p.softmax(0), "_softmax"),
    "unscale": (
        lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
            [p], torch.zeros(1), torch.ones(1)
        ),
        "_amp_foreach_non_finite_check_and_unscale_",
    ),
    "written to another": (lambda p: torch.zeros(3, 4).add_(p).sum(), "sum"),
    "written by out": (lambda p: _out(torch.empty(3, 4), p).sum(), "sum"),
    "one of a list": (lambda p: torch._foreach_mul([torch.ones(2), p], 2)[1].sum(), "sum"),
    "made of a list": (lambda p: _written_of([torch.ones(3, 4)], [p]).sum(), "sum"),
    "where": (lambda p: torch.where(p > 0), "nonzero"),
    "numpy": (lambda p: p.numpy(), "Tensor.numpy"),
    "NumPy's norm": (lambda p: numpy.linalg.norm(p), "a NumPy function"),
    "tolist": (lambda p: p.tolist(), "Tensor.tolist"),
    "std of another type": (lambda p: p.double().std(), "std"),
}


def _out(made: Tensor, p: Tensor) -> Tensor:
    return torch.maximum(p, p, out=made)


def _written_of(written: list[Tensor], read: list[Tensor]) -> Tensor:
    torch._foreach_add_(written, read)
    return written[0]


@pytest.mark.parametrize("is_inferring", [False, True])
@pytest.mark.parametrize("what", ALSO_REFUSED)
def test_other_work_on_pieces_is_refused(what: str, is_inferring: bool) -> None:
    """In inference mode torch takes operators apart later."""
    work, name = ALSO_REFUSED[what]
    with torch.inference_mode(is_inferring):
        assert refusal(work) == name


def test_the_value_of_a_piece_of_one_element_is_refused() -> None:
    assert refusal(lambda p: float(p), torch.ones(1)) == "item"


PASSING: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda p: (2 - p) / (1 + p.abs()).sqrt() ** 2,
    "type": lambda p: p.double().type_as(p).to(torch.float16).float().cpu(),
    "views": lambda p: p.data.detach()[...][:].view_as(p).reshape(3, 4).contiguous(),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "mask": lambda p: p.__setitem__(p > 0, 0.0),
    "all of it": lambda p: p.__setitem__(slice(None), 2.0),
    "like": lambda p: torch.full_like(p, 2.0).copy_(p).zero_(),
    "new": lambda p: p.new_zeros(()).item() + p.new_ones(3).sum(),
    "others": lambda p: p.mul_(torch.ones(5).norm()).add_(torch.ones(4)),
    "other of a list": lambda p: torch._foreach_mul([torch.ones(2), p], 2)[0].sum(),
    "maximum": lambda p: torch.maximum(p, p, out=torch.empty(3, 4)).clamp_(min=0).nan_to_num_(),
    "lists": lambda p: torch._foreach_lerp_([p], torch._foreach_maximum([p], 0.0), 0.1),
    "values": lambda p: nn.utils.clip_grad_value_([_with_gradient(p)], 0.5),
    "complex": lambda p: torch.view_as_real(torch.complex(p, p)).mul_(2),
    "shape": lambda p: (p.shape, p.numel(), p.dtype, p.is_contiguous(), len(p)),
    "printed": lambda p: f"{p}",
    "copied": lambda p: copy.deepcopy(p),
    "saved": lambda p: torch.save(p, io.BytesIO()),
}


def _with_gradient(p: Tensor) -> Tensor:
    made = p.detach().clone().requires_grad_()
    made.grad = p
    return made


@pytest.mark.parametrize("is_inferring", [False, True])
@pytest.mark.parametrize("what", PASSING)
def test_work_element_by_element_passes(what: str, is_inferring: bool) -> None:
    with torch.inference_mode(is_inferring):
        assert refusal(PASSING[what]) == ""


def test_pieces_of_other_cuts_do_not_meet() -> None:
    """Squares of equal shape are other parts of their wholes."""
    memory = PieceMemory()
    one, other = torch.ones(2, 2), torch.ones(2, 2)
    memory.note(one, ROWS)
    memory.note(other, COLUMNS)
    with as_in_one_process(memory, "update"):
        torch._foreach_add_([one, other], [one, other])  # each with its own
        with pytest.raises(RuntimeError, match=r"takes add of a piece .* with one that is cut"):
            one + other
        with pytest.raises(RuntimeError, match="takes _foreach_add_ of a piece"):
            torch._foreach_add_([one, other], [other, one])


def test_no_memory_is_kept() -> None:
    memory = PieceMemory()
    tensor = torch.ones(3)
    memory.note(tensor, ROWS)
    held = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert held.expired()
    assert memory._held
    memory.forget_freed()
    assert not memory._held


def test_no_operator_that_works_entry_by_entry_takes_a_dimension() -> None:
    """Torch's tags say which do; one that has an argument of a reduction has a wrong tag."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    reducing = {"dim", "dims", "dimension", "keepdim", "reduction", "generator", "axis"}
    found = []
    for name in names:
        family, _, overload = name.removeprefix("aten::").partition(".")
        try:
            op = getattr(getattr(torch.ops.aten, family), overload or "default")
        except AttributeError:
            continue  # it is of TorchScript alone
        if is_entrywise(op):
            found.append(op)
            assert reducing.isdisjoint(each.name for each in op._schema.arguments), op
            assert all(str(each.type) != "bool" for each in op._schema.returns), op
    assert len(found) > 500


TENSOR = "a rate in a tensor"
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    TENSOR: partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.1),
    "adamax": partial(torch.optim.Adamax, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
}
FUSED = ("sgd", "adam", "adamw", "adagrad", TENSOR)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {"foreach": True}) for name in OPTIMIZERS if name != TENSOR),
        *((name, {"foreach": False}) for name in OPTIMIZERS),
        *((name, {"fused": True}) for name in FUSED),
    ],
)
def test_optimizers_of_torch_pass(name: str, how: dict[str, Any], kind: str) -> None:
    make = partial(OPTIMIZERS[name], **how)
    x, y = data()
    plain = Net(optimizer=make)
    train = step_of(on(kind, optimizer=make))
    for _ in range(2):
        loss = plain.loss(x, y)
        loss.backward()
        plain.update()
        torch.testing.assert_close(train(x, y), loss.detach(), rtol=1e-5, atol=1e-6)


def test_optimizers_of_users_that_work_element_by_element_pass() -> None:
    def lion(net: Net) -> None:
        parameters = [p for p in net.parameters() if p.grad is not None]
        if not net.kept:
            net.kept = [torch.zeros_like(p) for p in parameters]
        with torch.no_grad():
            for parameter, kept in zip(parameters, net.kept, strict=True):
                assert parameter.grad is not None
                parameter.add_(kept.lerp(parameter.grad, 0.1).sign_(), alpha=-0.01)
                kept.lerp_(parameter.grad, 0.01)
                parameter.grad = None

    x, y = data()
    plain = Net(work=lion)
    train = step_of(on("tp", work=lion))
    for _ in range(3):
        loss = plain.loss(x, y)
        loss.backward()
        plain.update()
        torch.testing.assert_close(train(x, y), loss.detach(), rtol=1e-5, atol=1e-6)


class Lion(torch.optim.Optimizer):
    """An optimizer with attributes of its own, which torch leaves out of copies."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.trained = [p for group in self.param_groups for p in group["params"]]
        self.rate = 0.1

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.trained:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad.sign(), alpha=self.rate)


def test_optimizers_keep_attributes_of_their_own() -> None:
    """In the virtual world, too, where the objects of ranks are copies of one."""
    x, y = data()
    plain = Net(optimizer=Lion)
    train = step_of(on("tp", optimizer=Lion))
    for _ in range(2):
        loss = plain.loss(x, y)
        loss.backward()
        plain.update()
        torch.testing.assert_close(train(x, y), loss.detach(), rtol=1e-5, atol=1e-6)


def test_operators_are_looked_at_in_the_first_calls_and_then_seldom() -> None:
    modes: list[int] = []
    train = step_of(on("tp", work=lambda net: modes.append(_modes())))
    for _ in range(10):
        train(*data())
    seen = [index for index, mode in enumerate(modes[::2]) if mode]
    assert modes[::2] == modes[1::2]  # of two ranks
    assert seen == [0, 1, 2, 4, 8]


@pytest.mark.parametrize(("begins", "found"), [(0, 0), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_work_that_begins_late_is_found_at_the_next_look(begins: int, found: int) -> None:
    calls: dict[int, int] = {}

    def work(net: Net) -> None:
        number = calls[id(net)] = calls.get(id(net), -1) + 1
        if number >= begins:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    train = step_of(on("tp", work=work))
    for _ in range(found):
        train(*data())
    with pytest.raises(cg.RemoteError, match="takes _foreach_norm of a piece") as info:
        train(*data())
    since = f"call {found + 1} of the method. Call {found // 2 + 1} was the last that was looked at"
    assert (since in str(info.value)) == (found > 2)


def test_looks_become_seldom_and_go_on() -> None:
    number, looks = 0, [0]
    while number < 3000:
        number += until_next(number)
        looks.append(number)
    assert looks[:11] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert looks[11:] == [1024, 1536, 2048, 2560, 3072]


def _modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize(("place", "is_watched"), [(cg.mesh(dp=2), True), (1, False)])
def test_norms_pass_where_nothing_is_cut(place: Any, is_watched: bool) -> None:
    modes: list[int] = []
    plan = {"plan": {"loss(x)|loss(y)": cg.cut(0, "dp")}} if is_watched else {}
    net = Net.on(place, **plan)(  # type: ignore[attr-defined]
        work=lambda net: modes.append(_modes() + 0 * len(str(gradient(net).norm().item())))
    )
    step_of(net)(*data())
    assert modes == ([1, 1] if is_watched else [0])


def test_what_another_method_has_made_of_pieces_is_known() -> None:
    net = on("tp")

    @cg.trace
    def step() -> Any:
        net.keep()
        return net.measure()

    with pytest.raises(cg.RemoteError, match="measure takes sum of a piece"):
        step()


def test_arguments_of_opaque_methods_are_whole() -> None:
    net = Net.on(cg.mesh(dp=2), plan={"look(x)": cg.cut(0, "dp")})()  # type: ignore[attr-defined]
    step = cg.trace(lambda x: net.look(x))
    with pytest.raises(cg.TraceError, match=r"opaque, and the plan of net.* cuts what"):
        step(data()[0])
    whole = Net.on(cg.mesh(dp=2), plan={"look(x)": cg.whole})()  # type: ignore[attr-defined]
    assert cg.trace(lambda x: whole.look(x))(data()[0]) == float(data()[0].mean())


LEAVES = ("p", "g", "m", "scale", "row", "number")
SHAPE = (4, 6)
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "tanh": torch.tanh,
    "sign": torch.sign,
    "double": lambda x: x.double().float(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "clone": torch.clone,
    "like": torch.ones_like,
    "written": lambda x: x.clone().mul_(0.5).clamp_(-1, 1),
    "list": lambda x: torch._foreach_exp(torch._foreach_neg(torch._foreach_abs([x])))[0],
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "atan2": torch.atan2,
    "list": lambda x, y: torch._foreach_mul([x], [y])[0],
}
REDUCING: dict[str, Callable[[Any], Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": torch.norm,
    "max": torch.max,
    "std": lambda x: x.double().var(correction=0).sqrt().float(),
    "sum of columns": lambda x: x.sum(0, keepdim=True) if x.dim() else x.sum(),
    "sum of rows": lambda x: x.sum(-1, keepdim=True) if x.dim() else x.sum(),
    "norm of a list": lambda x: torch._foreach_norm([x])[0],
    "item": lambda x: torch.tensor(float(x.sum())),
}

Tree = tuple[Any, ...]

TREES: st.SearchStrategy[Tree] = st.recursive(
    st.tuples(st.sampled_from(LEAVES)),
    lambda inner: st.one_of(
        st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), inner),
        st.tuples(st.just("reducing"), st.sampled_from(sorted(REDUCING)), inner),
        st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), inner, inner),
    ),
    max_leaves=8,
)


def _value(tree: Tree, leaves: dict[str, Tensor]) -> Tensor:
    kind, *rest = tree
    if kind in leaves:
        return leaves[kind]
    work: Callable[..., Tensor] = {"unary": UNARY, "binary": BINARY, "reducing": REDUCING}[kind][
        rest[0]
    ]
    return work(*(_value(part, leaves) for part in rest[1:]))


def _has_pieces(tree: Tree) -> bool:
    kind, *rest = tree
    return kind in ("p", "g", "m") or any(map(_has_pieces, rest[1:]))


def _reduces_pieces(tree: Tree) -> bool:
    kind, *rest = tree
    return (kind == "reducing" and _has_pieces(tree)) or any(map(_reduces_pieces, rest[1:]))


CUTS: list[tuple[Layout, list[Region]]] = [
    (ROWS, [(((0, 2),), ((0, 6),)), (((2, 4),), ((0, 6),))]),
    (COLUMNS, [(((0, 4),), ((0, 3),)), (((0, 4),), ((3, 6),))]),
]


@examples(200, shrinks=True)
@given(tree=TREES, seed=st.integers(0, 9), cut=st.sampled_from(range(2)))
def test_what_passes_gives_pieces_of_what_the_whole_gives(tree: Tree, seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout, regions = CUTS[cut]
    whole = {name: torch.randn(SHAPE, generator=generator) for name in "pgm"}
    others = {
        "scale": torch.randn((), generator=generator),
        "row": torch.randn(1, 1, generator=generator),
        "number": torch.tensor(2.0),
    }
    expected = _value(tree, whole | others)
    for region in regions:
        pieces = {name: piece(tensor, region) for name, tensor in whole.items()}
        memory = PieceMemory()
        for each in pieces.values():
            memory.note(each, layout)
        try:
            with as_in_one_process(memory, "update"):
                found = _value(tree, pieces | others)
        except RuntimeError:
            assert _reduces_pieces(tree)
            continue
        assert not _reduces_pieces(tree)
        mine = piece(expected, region) if _has_pieces(tree) else expected
        torch.testing.assert_close(found, mine, equal_nan=True)
