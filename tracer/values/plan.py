"""Sharding plans: which tensors of an actor are cut, and along which axes of its mesh."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn

from ...ir.layout import WHOLE, Cut, Layout
from ...ir.types import Mesh
from .float8_layers import Float8Layers, Float8Recipe
from .mesh import describe


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a tensor, such as heads: a cut may lie between two of them, but not within one.

    Attributes:
        axes: the axes that cut the tensor between its parts.
        count: the number of parts.
        noun: what the parts are, in words.
        remedy: what to do where ranks would not have whole parts.
    """

    axes: tuple[str, ...]
    count: int
    noun: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Sharding:
    """The cuts of a tensor whose number of dimensions is not known yet.

    Attributes:
        cuts: by dimension; a negative one counts from the last.
        parts: what the cuts must leave whole.
    """

    cuts: tuple[tuple[int, Cut], ...] = ()
    parts: tuple[Parts, ...] = ()

    def __and__(self, other: Sharding) -> Sharding:
        """Both: `cut(0, "tp") & cut(1, "dp")`."""
        return Sharding(self.cuts + other.cuts, self.parts + other.parts)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that it cuts along."""
        return frozenset(axis for _, cut in self.cuts for axis in cut.axes)

    def without(self, axes: frozenset[str]) -> Sharding:
        """The cuts along other axes."""
        kept = [
            (d, replace(c, axes=tuple(a for a in c.axes if a not in axes))) for d, c in self.cuts
        ]
        return replace(self, cuts=tuple((dim, cut) for dim, cut in kept if cut))

    def __str__(self) -> str:
        """Python that makes the cuts."""
        return " & ".join(_cut_text(dim, cut) for dim, cut in self.cuts) or "cg.whole"

    def layout(self, mesh: Mesh, shape: tuple[int, ...], shown: str) -> Layout | None:
        """The layout of a tensor of `shape` over a mesh; None if every rank holds a copy.

        Axes of size 1 cut nothing. A dimension that is cut twice is cut along the axes of the
        first cut, and each piece along those of the second.

        Args:
            mesh: the ranks that hold the tensor.
            shape: the shape of the logical tensor.
            shown: the tensor in words, for messages.

        Raises:
            ValueError: the mesh lacks an axis, an axis is used twice, there is no such dimension,
                the blocks of one are not of equal size, or a part would be cut.
        """
        sizes = dict(mesh.grid)
        dim_cuts = [WHOLE] * len(shape)
        used: set[str] = set()
        for dim, cut in self.cuts:
            if not -len(shape) <= dim < len(shape):
                raise ValueError(
                    f"{shown} has {len(shape)} dimensions, so dimension {dim} cannot be cut; "
                    f"those that can are {list(range(len(shape)))}"
                )
            for axis in cut.axes:
                if axis not in sizes:
                    raise ValueError(
                        f"{shown} is cut along '{axis}', but {describe(mesh)} has none"
                    )
                if axis in used:
                    raise ValueError(f"{shown} is cut along '{axis}' twice")
                used.add(axis)
            if shape[dim] % cut.blocks:
                raise ValueError(
                    f"{shown} has {shape[dim]} entries in dimension {dim}, which are not "
                    f"{cut.blocks} blocks of equal size"
                )
            dim_cuts[dim] = _both(dim_cuts[dim], cut, sizes, shown, dim)
        for parts in self.parts:
            pieces = math.prod(sizes[axis] for axis in parts.axes)
            if parts.count % pieces:
                raise ValueError(
                    f"{shown} has {parts.count} {parts.noun}, which cannot be cut to {pieces} "
                    f"equal pieces along {', '.join(parts.axes)}; {parts.remedy}"
                )
        return Layout.of(dim_cuts)


def _cut_text(dim: int, cut: Cut) -> str:
    blocks = f", blocks={cut.blocks}" if cut.blocks > 1 else ""
    order = ', order="zigzag"' if cut.zigzag else ""
    return f"cg.cut({dim}, {', '.join(map(_quoted, cut.axes))}{blocks}{order})"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _both(first: Cut, second: Cut, sizes: Mapping[str, int], tensor_name: str, dim: int) -> Cut:
    """A cut along the axes of `first`, then along those of `second`, without axes of size 1."""
    if first and second.blocks not in (1, first.blocks):
        raise ValueError(
            f"{tensor_name} is cut in {first.blocks} blocks along {first}, then in {second.blocks} "
            f"along {second}, in dimension {dim}; give the blocks with the first cut"
        )
    if first and first.zigzag is not second.zigzag:
        raise ValueError(
            f"{tensor_name} is cut along {first}, then along {second}, in dimension {dim}, and one "
            "of the cuts is in zigzag order; give both that order, or neither"
        )
    axes = first.axes + tuple(axis for axis in second.axes if sizes[axis] > 1)
    return replace(first or second, axes=axes) if axes else WHOLE


def plan(
    shardings: Mapping[str, Sharding],
    attention: AttentionForm | None = None,
    sequence: str | Iterable[str] = (),
) -> ShardingPlan:
    """Make a sharding plan: which tensors and arguments of an actor on a mesh are cut, and how.

    Args:
        shardings: `cut` or `whole` by pattern, of which the first that matches counts. A pattern is
            the path of a tensor of the actor's state (`blocks.0.q.weight`) with `*` and `?` as in
            file names, an argument of a method (`forward(x)`), or several with `|` between. What
            no pattern matches is whole.
        attention: the form of attention whose sequence is cut: "gather" of keys and values, "heads"
            for rows, or "ring", in which keys and values travel while others are computed with.
            None: for each op the one that is expected to be the fastest.
        sequence: axes that cut weights, and that are to cut tokens between the layers of these
            weights, too (sequence parallelism). Sums that a product with a weight leaves over them
            are reduced to tokens, and tokens are gathered where a weight's outputs are cut.

    Raises:
        TypeError: a value is no sharding.
        ValueError: there is no such form of attention.
    """
    axes = (sequence,) if isinstance(sequence, str) else tuple(sequence)
    return ShardingPlan.of(shardings, attention=attention, sequence=axes)


whole = Sharding()
"""Every rank of the mesh holds a copy."""


def cut(
    dim: int, *axes: str, blocks: int = 1, order: Literal["rows", "zigzag"] = "rows"
) -> Sharding:
    """Cut a dimension along axes of the mesh, the major one first.

    Args:
        dim: the dimension; a negative one counts from the last.
        axes: names of axes of the mesh.
        blocks: the dimension is so many blocks of equal size, and each of them is cut, as in a
            projection that makes queries, keys and values at once (3).
        order: "rows": rank k of n has piece k of n. "zigzag": it has pieces k and 2n - 1 - k of 2n,
            so that ranks that cut a sequence do equal work in causal attention.

    Raises:
        ValueError: no axis is given, `blocks` is not positive, or there is no such order.
    """
    if not axes:
        raise ValueError("cg.cut needs an axis of the mesh to cut along, as in cg.cut(0, 'dp')")
    if blocks < 1:
        raise ValueError(f"cg.cut: blocks is {blocks}; it is 1, or the number of packed blocks")
    if order not in ("rows", "zigzag"):
        raise ValueError(f"cg.cut: order is {order!r}; it is 'rows' or 'zigzag'")
    return Sharding(((dim, Cut(axes, blocks, zigzag=order == "zigzag")),))


def float8(
    *patterns: str, recipe: str = "tensorwise", skip: str | Iterable[str] = ()
) -> ShardingPlan:
    """Name the linear layers of an actor that compute in float8, for its plan.

    The products of the forward and of the backward are of float8 tensors, which are scaled by their
    greatest magnitudes. Weights keep their type. `Cls.on(0, plan=cg.float8("blocks.*"))` is an
    actor on one rank; on a mesh, `plan | cg.float8("blocks.*")` is such a plan.

    A layer is a call of `torch.nn.functional.linear`, such as that of `nn.Linear`, with a weight of
    the actor. A matrix stays as it is if `skip` names its module, if it is not of float32, bfloat16
    or float16, or if a size of it is no multiple of 16; dumps and the logger `cg` say so.

    Args:
        patterns: names of modules (`blocks.0.up`) with `*` and `?` as in file names; "*": all.
        recipe: "tensorwise", one scale for a tensor, with gradients in e5m2; or "rowwise", a scale
            for each row that a product contracts, with gradients in e4m3. They are those of
            torchao (`Float8LinearConfig.from_recipe_name`).
        skip: names of modules, with `*` and `?`, that stay as they are. An actor need not have
            them, so the stages of a model may share a plan.

    Raises:
        ValueError: there is no such recipe, or no pattern. `Cls.on(...)(...)` raises it if a
            pattern names no module with a matrix.
    """
    names = [each.value for each in Float8Recipe]
    if recipe not in names:
        raise ValueError(f"cg.float8: there is no recipe '{recipe}'; there are {', '.join(names)}")
    if not patterns:
        raise ValueError('cg.float8 needs names of modules, as in cg.float8("blocks.*")')
    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    return ShardingPlan(float8=(Float8Layers(patterns, Float8Recipe(recipe), skipped),))


Matches: TypeAlias = Callable[[str], bool]

AttentionForm: TypeAlias = Literal["gather", "heads", "ring"]
"""The form of attention over a sequence that ranks have cut."""

_FORMS = ("gather", "heads", "ring")

_ARGUMENT = re.compile(r"(?P<method>\w+)\((?P<argument>\w+)\)")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Shardings by pattern; the first pattern that matches counts, and what none matches is whole.

    A pattern is the path of a tensor of the actor's state (`blocks.0.q.weight`) with `*` and `?` as
    in file names, or an argument of a method (`forward(x)`), or several of these with `|` between.
    `attention` is the form of attention whose sequence is cut; None: the fastest. Axes of
    `sequence` cut tokens between the layers whose weights they cut.
    """

    items: tuple[tuple[str, Sharding], ...] = ()
    _alternatives: tuple[tuple[str, str, Sharding], ...] = field(default=(), repr=False)
    _optional: tuple[tuple[str, frozenset[str]], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    float8: tuple[Float8Layers, ...] = ()
    attention: AttentionForm | None = None
    sequence: tuple[str, ...] = ()

    @staticmethod
    def of(
        shardings: Mapping[str, Sharding],
        optional: str | None = None,
        notes: tuple[str, ...] = (),
        attention: AttentionForm | None = None,
        sequence: tuple[str, ...] = (),
    ) -> ShardingPlan:
        """Make a plan.

        Args:
            shardings: by pattern.
            optional: the model whose plan this is. An actor may have a part of the model, so some
                patterns may match nothing, but not all of them.
            notes: what stays whole, and why.
            attention, sequence: as `plan` takes them.

        Raises:
            TypeError: a value is no sharding.
            ValueError: there is no such form of attention.
        """
        if attention is not None and attention not in _FORMS:
            raise ValueError(
                f"a plan's attention is {attention!r}; it is 'gather', 'heads' or 'ring', or None"
            )
        for pattern, sharding in shardings.items():
            if not isinstance(sharding, Sharding):
                raise TypeError(
                    f"the plan gives {sharding!r} for '{pattern}'; give cg.cut(...) or cg.whole"
                )
        items = tuple(shardings.items())
        alternatives = tuple(
            (alternative.strip(), pattern, sharding)
            for pattern, sharding in items
            for alternative in pattern.split("|")
        )
        optional_plans = () if optional is None else ((optional, frozenset(shardings)),)
        return ShardingPlan(
            *(items, alternatives, optional_plans, notes), attention=attention, sequence=sequence
        )

    def __or__(self, other: ShardingPlan) -> ShardingPlan:
        """Both; where both name a tensor or an argument, this one counts."""
        return ShardingPlan(
            self.items + other.items,
            self._alternatives + other._alternatives,
            self._optional + other._optional,
            self.notes + other.notes,
            self.float8 + other.float8,
            self.attention or other.attention,
            self.sequence or other.sequence,
        )

    def __str__(self) -> str:
        """Python that makes the plan, with its notes as comments."""
        lines = [f"    {_quoted(pattern)}: {sharding}," for pattern, sharding in self.items]
        form = "" if self.attention is None else f", attention={_quoted(self.attention)}"
        if self.sequence:
            form += f", sequence=[{', '.join(map(_quoted, self.sequence))}]"
        float8 = [f"| {layers}" for layers in self.float8]
        notes = (f"# {note}" for note in self.notes)
        return "\n".join(["cg.plan({", *lines, f"}}{form})", *float8, *notes])

    def of_tensor(self, path: str) -> Sharding | None:
        """The sharding of a tensor of the actor's state; None if no pattern matches its path."""
        return self._first(lambda form: not _is_argument(form) and fnmatchcase(path, form))

    def of_argument(self, method: str, argument: str) -> Sharding | None:
        """The sharding of a method's argument; None if no pattern names it."""
        return self._first(lambda form: form == f"{method}({argument})")

    def _first(self, matches: Matches) -> Sharding | None:
        shardings = (sharding for form, _, sharding in self._alternatives if matches(form))
        return next(shardings, None)

    def check(self, cls: type, paths: Iterable[str], arguments: Iterable[tuple[str, str]]) -> None:
        """Refuse patterns that match nothing: a misspelt one would leave a tensor whole.

        Args:
            cls: the actor's class, for messages.
            paths: of all tensors of its state.
            arguments: method and argument, of all its methods.

        Raises:
            ValueError: a pattern matches no tensor and no argument.
        """
        known, taken = tuple(paths), {f"{method}({name})" for method, name in arguments}
        optional = {pattern for _, patterns in self._optional for pattern in patterns}
        used: set[str] = set()
        for form, pattern, _ in self._alternatives:
            if form in taken or any(fnmatchcase(path, form) for path in known):
                used.add(pattern)
                continue
            if pattern in optional:
                continue
            part = "" if form == pattern else f" of '{pattern}'"
            have = _own(cls, taken) if _is_argument(form) else list(known)
            have = list(dict.fromkeys([*get_close_matches(form, have), *have]))
            shown = ", ".join(have[:8]) + (", ..." if len(have) > 8 else "") if have else "none"
            kind = "arguments" if _is_argument(form) else "tensors"
            raise ValueError(
                f"the plan's pattern '{form}'{part} matches nothing of {cls.__name__}; "
                f"its {kind} are {shown}"
            )
        for model, patterns in self._optional:
            if not used & {p for p in patterns if not _is_argument(p)}:
                raise ValueError(
                    f"the plan of {model} matches no tensor of {cls.__name__}; its tensors are "
                    f"{', '.join(known[:8])}; make the plan of the model that the actor has"
                )


def _own(cls: type, arguments: Iterable[str]) -> list[str]:
    """The arguments of a class's own methods, without methods that every module has."""
    of_modules = {
        name
        for name, value in vars(nn.Module).items()
        if inspect.getattr_static(cls, name, None) is value
    }
    return sorted(
        argument for argument in arguments if argument.partition("(")[0] not in of_modules
    )


def _is_argument(form: str) -> bool:
    return _ARGUMENT.fullmatch(form) is not None
