"""Rules in einsum's letters, for matrix products, linear algebra and operators of users.

Where a contracted dimension of a product is cut, the result is left as summands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import Intervals, shape_of, volume, whole
from ....checked_ids import CHECKED_IDS
from ....method.experts.expert_products import EXPERT_LINEAR, EXPERT_OUTER, GROUPED_MM
from ....method.float8.formula import FLOAT8_MM
from ....method.quantized.quantized_expert_products import QUANTIZED_EXPERT_LINEAR
from ....method.quantized.quantized_product import QUANTIZED_PRODUCT
from ..cases import Answer, Case, Expansion, LocalOp, Operand, Rule, Shape
from ..cuts import is_interval
from ..factors import NOT_LINEAR, Dims, Factors, Linear, each, jointly, letters, sizes_of
from ..solution import solve
from ..tokens import reduced_to_tokens, rows_of_matrix
from .creation import zeros
from .decomposed import rule as rule_of_others
from .pointwise import broadcast
from .rows import first_entry

_ATEN = torch.ops.aten

_PRODUCTS = {
    _ATEN.mm.default: "mk,kn->mn",
    _ATEN.bmm.default: "bmk,bkn->bmn",
    _ATEN.mv.default: "mk,k->m",
    _ATEN.dot.default: "k,k->",
}

_SUMS_WITH_PRODUCTS = {
    _ATEN.addmm.default: ("mk,kn->mn", _ATEN.mm.default, ("mat1", "mat2")),
    _ATEN.baddbmm.default: ("bmk,bkn->bmn", _ATEN.bmm.default, ("batch1", "batch2")),
    _ATEN.addmv.default: ("mk,k->m", _ATEN.mv.default, ("mat", "vec")),
}

_OF_MATRICES: Mapping[object, str] = {
    _ATEN.linalg_inv_ex.default: "ij->ij,",
    _ATEN.linalg_cholesky_ex.default: "ij->ij,",
    _ATEN.cholesky_inverse.default: "ij->ij",
    _ATEN._linalg_det.default: "ij->,ij,i",
    _ATEN._linalg_slogdet.default: "ij->,,ij,i",
    _ATEN.linalg_lu_factor_ex.default: "ij->ij,k,",
    _ATEN.lu_unpack.default: "ij,k->il,im,nj",
    _ATEN.linalg_qr.default: "ij->ik,lj",
    _ATEN._linalg_svd.default: "ij->ik,l,mj",
    _ATEN._linalg_eigh.default: "ij->i,ij",
    _ATEN.linalg_householder_product.default: "ij,k->ij",
    _ATEN.linalg_matrix_exp.default: "ij->ij",
}
"""The last dimensions of ops on stacks of matrices. Those in front of them are of the stack."""

_DECLARED: dict[torch._ops.OpOverload, tuple[str, str]] = {}
"""Letters of each op, and those that may be cut. One for a process, like torch's operators."""


def _product(text: str, case: Case) -> Answer | Expansion:
    return _to_tokens(case, solve(case, _einsum(case, text)))


def _to_tokens(case: Case, answer: Answer) -> Answer | Expansion:
    """A product with a weight; a sum over axes that cut tokens is reduced to tokens."""
    layout = answer.results[0]
    if layout is None or len(case.shape()) != 2 or case.sequence.isdisjoint(layout.summands):
        return answer
    rows = rows_of_matrix(case.operands[0].node)
    return reduced_to_tokens(case, answer, rows) or answer


def _sum_with_product(
    text: str, product: Any, names: tuple[str, str], case: Case
) -> Answer | Expansion:
    """A bias is added once: if the product gives summands, the bias is added to their sum."""
    left, right = (case[name] for name in names)
    if _gives_summands(left, right, text):
        return Expansion(partial(_apart, product, names))
    operand_dims, result_dims = letters(text)
    (result,) = result_dims
    (bias,), _ = broadcast([case["self"].shape], case.shape())
    renamed = {f"d{i}": dim for i, dim in enumerate(result)}
    dims = tuple(renamed[dim[0]] if dim else () for dim in bias)
    shapes = [left.shape, right.shape]
    linear = (*jointly(0, 1), *jointly(0, 2))
    return solve(
        case, Factors((dims, *operand_dims), result_dims, sizes_of(operand_dims, shapes), linear)
    )


def _gives_summands(left: Operand, right: Operand, text: str) -> bool:
    """True if a product gives summands: a contracted dimension is cut, or a matrix is a sum."""
    if left.layout.summands or right.layout.summands:
        return True
    (first, second), (result,) = letters(text)
    pairs = [*zip(first, left.cuts, strict=True), *zip(second, right.cuts, strict=True)]
    return any(cut and dim not in result for dim, cut in pairs)


def _apart(
    product: Any,
    names: tuple[str, str],
    *,
    self: torch.Tensor,
    beta: float,
    alpha: float,
    **factors: Any,
) -> torch.Tensor:
    result: torch.Tensor = product(factors[names[0]], factors[names[1]])
    scaled = result if alpha == 1 else result * alpha
    return scaled + (self if beta == 1 else self * beta)


def _triangular(case: Case) -> Answer | Expansion:
    """Each column is solved by itself; rows instead, if the unknown is the left factor."""
    return _stacked("ij,ic->jc" if case["left"] else "ij,cj->ci", "c", each(1), case)


def _by_lu(case: Case) -> Answer | Expansion:
    return _stacked("ij,k,ic->jc" if case["left"] else "ij,k,cj->ci", "c", each(2), case)


def _by_cholesky(case: Case) -> Answer | Expansion:
    return _stacked("ic,ij->jc", "c", each(0), case)


def _solved(case: Case) -> Answer | Expansion:
    """A right side of one dimension less has a vector for each matrix."""
    left, right = (case[name].shape for name in ("A", "B"))
    sides = "ik,jk" if case["left"] else "ki,kj"
    if len(right) == 1 or (len(right) == len(left) - 1 and right == left[:-1]):
        sides = "i,j"
    side, result = sides.split(",")
    return _stacked(f"ij,{side}->{result},ij,i,", "", NOT_LINEAR, case)


def _checked_errors(case: Case) -> Answer:
    """Each rank checks its own matrices; an error counts them in the rank's piece."""
    (codes,) = case.operands
    factors = broadcast([codes.shape], codes.shape)[0]
    sizes = sizes_of(factors, [codes.shape])
    return solve(case, Factors(factors, (None,), sizes))


def _stacked(text: str, free: str, linear: Linear, case: Case) -> Answer | Expansion:
    """Matrices stay whole but for the letters of `free`, and stacks of them are broadcast."""
    operands, results = letters(text)
    shapes = [operand.shape for operand in case.operands]
    ranks = [len(core) for core in operands]
    stack = case.shape()[: len(case.shape()) - len(results[0])]
    if any(len(case.shape(i)) != len(stack) + len(core) for i, core in enumerate(results)):
        return rule_of_others(case)  # such as an SVD without vectors: what it leaves out is [0]
    leading, front = broadcast([s[: len(s) - r] for s, r in zip(shapes, ranks, strict=True)], stack)
    dims = tuple((*lead, *core) for lead, core in zip(leading, operands, strict=True))
    result_dims = tuple((*front, *core) for core in results)
    sizes = {f"d{i}": size for i, size in enumerate(stack)} | sizes_of(
        result_dims, [case.shape(i) for i in range(len(results))]
    )
    sizes |= sizes_of(operands, [s[len(s) - r :] for s, r in zip(shapes, ranks, strict=True)])
    named = {dim[0] for core in (*operands, *results) for dim in core}
    keep = dict.fromkeys(sorted(named - {*free}), "is of whole matrices")
    return solve(case, Factors(dims, result_dims, sizes, linear, keep), local=_local)


def _float8_product(case: Case) -> Answer | Expansion:
    """Scales by row are cut as the rows are; those of a whole tensor are copies."""
    operands, results = letters("mk,nk->mn")
    dims = [
        (dims[0], ()) if case[name].shape else ()
        for dims, name in zip(operands, _SCALES, strict=True)
    ]
    shapes = [operand.shape for operand in case.operands[:2]]
    factors = Factors((*operands, *dims), results, sizes_of(operands, shapes), each(0, 1))
    return _to_tokens(case, solve(case, factors))


_SCALES = ("left_scale", "right_scale")


def _quantized_product(case: Case) -> Answer:
    """Runs of outputs and groups of inputs may be cut; what shares a word or scale stays whole."""
    text = "mJwe,PuJw,PvJ" + ",PzJ" * (case["zero"] is not None) + "->smPuo"
    operands, results = letters(text)
    sizes = sizes_of(operands, [operand.shape for operand in case.operands])
    sizes |= sizes_of(results, [case.shape()])
    keep = dict.fromkeys("euvzo", "shares words or scales") | {"s": "is of summands"}
    factors = Factors(operands, results, sizes, each(0), keep)
    return solve(case, factors, local=_local)


def _expert_linear(case: Case) -> Answer:
    """Tokens may be cut anywhere. If experts are cut, a rank gives zeros for those of others."""
    text = {2: "ti,eoi,tk->tko", 3: "tki,eoi,tk->tko"}[_rank(case, "input")]
    factors = replace(_einsum(case, text), choice=("e", 2))
    if not is_interval(case["weight"].cuts[0]):
        factors = replace(factors, keep={"e": "is packed"})
    return solve(case, factors, local=partial(_local_linear, case["weight"].shape[0], 2))


def _quantized_expert_linear(case: Case) -> Answer:
    """As of a plain weight; of stored tensors experts alone are cut, all of them alike."""
    rows, *tensors = case.operands[:-1]
    operands: list[Dims] = [(("t",), ("k",), ("i",)) if len(rows.shape) == 3 else (("t",), ("i",))]
    for number, tensor in enumerate(tensors):
        inner = tuple((f"{number}.{dim}",) for dim in range(1, len(tensor.shape)))
        operands.append((("e",), *inner))
    dims, result = (*operands, (("t",), ("k",))), (("t",), ("k",), ("o",))
    sizes = sizes_of(dims, [operand.shape for operand in case.operands])
    sizes |= sizes_of([result], [case.shape()])
    keep = dict.fromkeys(sizes.keys() - {"t", "k", "e"}, "is of quantized weights")
    if not is_interval(tensors[0].cuts[0]):
        keep["e"] = "is packed"
    factors = Factors(
        dims,
        (result,),
        sizes,
        NOT_LINEAR if case["rounds"] else each(0),
        keep,
        zeros=each(0),
        choice=("e", len(tensors) + 1),
    )
    return solve(case, factors, local=partial(_local_linear, tensors[0].shape[0], len(tensors) + 1))


def _local_linear(experts: int, ids: int, op: LocalOp) -> Any:
    """`ids`: which operand they are."""
    weights = op.operands[1:ids]
    if not all(all(shape_of(weight)) for weight in weights):
        return zeros(op, op.arguments["input"])
    return op.run(**_own(op, weights[0][0], experts, _checked(op, experts, ids)))


def _checked(op: LocalOp, experts: int, ids: int = 2) -> fx.Node:
    """The ids. Without a check, one out of range would be of no rank's experts, and give zeros."""
    place = first_entry(op.operands[ids])
    return op.emit(CHECKED_IDS, op.arguments["ids"], experts, None, "expert_linear", place)


def _own(op: LocalOp, here: Intervals, experts: int, ids: fx.Node) -> dict[str, Any]:
    """Ids that count from the rank's first expert; those of others are beyond its experts."""
    ((first, last),) = here
    if last - first == experts:
        return {}
    return {"ids": op.emit(_ATEN.sub.Tensor, ids, first), "partial": True}


def _expert_outer(case: Case) -> Answer:
    """The gradient of weights: tokens are summed over ranks, and experts computed where asked."""
    left, right = ({2: "t", 3: "tk"}[_rank(case, name)] for name in ("left", "right"))
    factors = _einsum(case, f"{left}o,{right}i,tk->eoi")
    factors = replace(factors, sizes={**factors.sizes, "e": case.shape()[0]}, choice=("e", 2))
    return solve(case, factors, local=partial(_local_outer, case.shape()[0]), free={0: "e"})


def _local_outer(experts: int, op: LocalOp) -> Any:
    region = op.results[0]
    assert region is not None
    if not all(shape_of(region)):
        return zeros(op, op.arguments["left"])
    here, *others = region
    if len(here) > 1:
        return op.piece(op.run(), (here, *whole(shape_of(tuple(others)))))
    return op.run(experts=here[0][1] - here[0][0], **_own(op, here, experts, op.arguments["ids"]))


def _rank(case: Case, name: str) -> int:
    return len(case[name].shape)


def _einsum(case: Case, text: str) -> Factors:
    operands, results = letters(text)
    sizes = sizes_of(operands, [operand.shape for operand in case.operands])
    return Factors(operands, results, sizes, each(0, 1))


def _grouped_mm(case: Case) -> Answer:
    """Groups end at given rows, so rows and groups stay whole; the other dimensions may be cut."""
    ranks = (_rank(case, "left"), _rank(case, "right"))
    text = {(2, 3): "gk,ekn,e->gn", (3, 2): "emk,kg,e->mg", (2, 2): "mg,gn,e->emn"}[ranks]
    keep = {"g": "is grouped", "e": "has the groups"}
    return solve(case, replace(_einsum(case, text), keep=keep))


RULES: Mapping[object, Rule] = {
    **{op: partial(_product, text) for op, text in _PRODUCTS.items()},
    **{op: partial(_sum_with_product, *row) for op, row in _SUMS_WITH_PRODUCTS.items()},
    **{op: partial(_stacked, text, "", NOT_LINEAR) for op, text in _OF_MATRICES.items()},
    _ATEN.linalg_solve_triangular.default: _triangular,
    _ATEN.linalg_lu_solve.default: _by_lu,
    _ATEN.cholesky_solve.default: _by_cholesky,
    _ATEN._linalg_solve_ex.default: _solved,
    _ATEN._linalg_check_errors.default: _checked_errors,
    EXPERT_LINEAR: _expert_linear,
    EXPERT_OUTER: _expert_outer,
    QUANTIZED_EXPERT_LINEAR: _quantized_expert_linear,
    GROUPED_MM: _grouped_mm,
    FLOAT8_MM: _float8_product,
    QUANTIZED_PRODUCT: _quantized_product,
}


def layout_rule(op: torch._ops.OpOverload, dimensions: str, *, cut: str) -> None:
    """Declare how an operator of your own works on pieces of tensors.

    Each dimension of the operator's tensors, and of its results, gets a letter, as in einsum;
    dimensions of one letter are cut alike. Where a letter is cut, each rank calls the operator with
    its pieces, and the call must give the rank's pieces of the results. Nothing is summed: a letter
    that may be cut stands in each result. Without a rule, an operator takes whole tensors only.

    For example, an attention kernel takes a query `[batch, heads, queries, width]`, and keys and
    values `[batch, heads, keys, width]`. It may be cut by batch and by heads:

        cg.layout_rule(torch.ops.mine.attend.default, "bhqw,bhkw,bhkw->bhqw", cut="bh")

    Declare it beside the operator, on every rank, before a step that calls it is lowered.

    Args:
        op: an overload of an operator, such as `torch.ops.mine.attend.default`.
        dimensions: a word for each tensor that it takes, in the order of its arguments; then `->`;
            then a word for each tensor that it returns. Commas separate words. The word of a tensor
            without dimensions is empty.
        cut: the letters that may be cut. All others must be whole.

    Raises:
        TypeError: `op` is no overload of an operator.
        ValueError: `dimensions` is no such text, a result lacks a letter of `cut`, or the operator
            has another rule already.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            "cg.layout_rule takes an overload of an operator, such as "
            f"torch.ops.mine.attend.default, not {op!r}"
        )
    declared = (dimensions.replace(" ", ""), cut)
    _check(op, *declared)
    if _DECLARED.setdefault(op, declared) != declared:
        raise ValueError(
            f"{op} has another layout rule, {_DECLARED[op][0]!r} with cut={_DECLARED[op][1]!r}; "
            "declare one rule, beside the operator"
        )


def declared_rule(op: torch._ops.OpOverload) -> Rule | None:
    """The rule that a user has declared for an op, or None."""
    declared = _DECLARED.get(op)
    return None if declared is None else partial(_rule, *declared)


def _check(op: torch._ops.OpOverload, dimensions: str, cut: str) -> None:
    operand_words, arrow, result_words = dimensions.partition("->")
    words = [*operand_words.split(","), *result_words.split(",")]
    wrong = [word for word in words if (word and not word.isalpha()) or len({*word}) < len(word)]
    if not arrow or wrong:
        raise ValueError(
            f"the layout rule of {op} is {dimensions!r}; it takes a word of letters, each once, "
            "for each tensor, as 'bhqw,bhkw,bhkw->bhqw'"
        )
    missing = [
        letter for letter in cut if any(letter not in word for word in result_words.split(","))
    ]
    if missing:
        raise ValueError(
            f"the layout rule of {op} may not cut {', '.join(missing)}, which is not in each of "
            f"its results {result_words}: what would come out on a rank is no piece of them"
        )


def _rule(dimensions: str, cut: str, case: Case) -> Answer:
    operand_dims, result_dims = letters(dimensions)
    _match(case, operand_dims, result_dims)
    sizes = sizes_of(operand_dims, [operand.shape for operand in case.operands])
    sizes |= sizes_of(result_dims, [case.shape(index) for index in range(len(result_dims))])
    named = {dim[0] for dims in (*operand_dims, *result_dims) for dim in dims}
    reason = f"in {dimensions}, of which {cut or 'nothing'} may be cut"
    keep = {letter: f"is {letter!r} {reason}" for letter in sorted(named - {*cut})}
    factors = Factors(operand_dims, result_dims, sizes, keep=keep, reduce=None)
    return solve(case, factors, local=_local)


def _local(op: LocalOp) -> Any:
    """Run the op. If results are empty, give empty tensors: kernels may refuse empty pieces."""
    if all(region is not None and not volume(region) for region in op.results):
        like = next(value for value in op.arguments.values() if isinstance(value, fx.Node))
        return zeros(op, like)
    return op.run()


def _match(case: Case, operand_dims: tuple[Dims, ...], result_dims: tuple[Dims, ...]) -> None:
    """Check that an op's tensors have the dimensions that its rule names.

    Raises:
        LayoutError: they have other dimensions, or one letter stands for two sizes.
    """
    taken = [operand.shape for operand in case.operands]
    if not _fits(operand_dims, taken) or not _fits(result_dims, case.shapes):
        raise case.error(
            f"its layout rule names {_spell(operand_dims)}->{_spell(result_dims)}, "
            f"but its tensors have {_count(taken)} -> {_count(case.shapes)} dimensions",
            "give the rule a word for each tensor, with a letter for each dimension",
        )
    sizes: dict[str, int] = {}
    pairs = zip((*operand_dims, *result_dims), (*taken, *case.shapes), strict=True)
    for dims, shape in pairs:
        for (letter,), size in zip(dims, shape or (), strict=True):
            if sizes.setdefault(letter, size) != size:
                raise case.error(
                    f"its layout rule has one letter {letter!r} for dimensions of "
                    f"{sizes[letter]} and {size}",
                    "give dimensions that differ letters of their own",
                )


def _fits(dims: tuple[Dims, ...], shapes: Sequence[Shape | None]) -> bool:
    return [len(word) for word in dims] == [
        None if shape is None else len(shape) for shape in shapes
    ]


def _count(shapes: Sequence[Shape | None]) -> str:
    return ", ".join("no" if shape is None else str(len(shape)) for shape in shapes)


def _spell(dims: tuple[Dims, ...]) -> str:
    return ",".join("".join(dim[0] for dim in word) for word in dims)
