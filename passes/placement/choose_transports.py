"""Choose the transport of each value, and record the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops import Collective, Op, Transfer
from ...ir.ops.module import Module, Program
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import ObjectType, Place, TensorType, format_ranks
from ..base import Pass
from .fabrics import HOST, Fabrics


@dataclass(frozen=True)
class ChooseTransports(Pass):
    """Send tensors between devices by the transport that joins these, and all else by the hosts'.

    A value that does not leave its ranks needs no transport. A choice of the user's, by `cg.via`,
    stays if the ranks and the type allow it. The pass runs if ranks have devices; hosts alone have
    one transport.

    With `ranks=nccl+nccl+-`, so that rank 2 has no device:

    Before::

        %h.at1 = transfer(%h) {mb = 0} : f32[2,8]@1
        %h.at2 = transfer(%h) {mb = 0} : f32[2,8]@2

    After::

        %h.at1 = transfer(%h) {mb = 0, via = "nccl", why = "a tensor from device to device"} : ...
        %h.at2 = transfer(%h) {mb = 0, via = "cpu", why = "rank 2 has no device"} : f32[2,8]@2

    Attributes:
        ranks, reduces: as in `Fabrics`.
    """

    ranks: str = ""
    reduces: str = ""

    name: ClassVar[str] = "choose-transports"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.PLACED,)

    def run(self, module: Module) -> bool:
        fabrics = Fabrics(self.ranks, self.reduces)
        changed = False
        for op in module.program.ops:
            if isinstance(op, Transfer | Collective) and op.why is None and not _stays(op):
                _check(op, fabrics, module.program)
                if op.via is not None:
                    op.why = "asked for by cg.via"
                else:
                    op.via, op.why = _choose(op, fabrics)
                changed = True
        return changed


def _stays(op: Transfer | Collective) -> bool:
    """True if a transfer goes to ranks that already have the value."""
    if not isinstance(op, Transfer):
        return False
    have, need = op.operands[0].type.place, op.result.type.place
    return have is None or need is None or have.covers(need)


def _ends(op: Transfer | Collective) -> Place:
    """The ranks between which a value travels."""
    if isinstance(op, Collective):
        return op.group
    have, need = op.operands[0].type.place, op.result.type.place
    assert have is not None, "a placed program says where values are"
    assert need is not None, "a placed program says where values are"
    return Place(tuple(dict.fromkeys((min(have.ranks), *need.ranks))))


def _choose(op: Transfer | Collective, fabrics: Fabrics) -> tuple[str, str]:
    ends = _ends(op)
    if _carries_objects(op):
        return HOST, "an object"
    if bare := fabrics.bare(ends):
        return HOST, f"{_named(bare)} no device"
    name = fabrics.joining(ends)
    if name is None:
        return HOST, "nothing joins these devices"
    if isinstance(op, Collective) and op.exchange.reduce is not None:
        type_ = op.operands[0].type
        assert isinstance(type_, TensorType), "only tensors are reduced"
        if not fabrics.can_reduce(type_.dtype):
            return HOST, f"{name} does not reduce {type_.dtype}"
    noun = "a tensor" if isinstance(op, Transfer) else "tensors"
    return name, f"{noun} from device to device"


def _check(op: Transfer | Collective, fabrics: Fabrics, program: Program) -> None:
    """Check a transport that the user has chosen: between devices, it carries tensors only.

    Raises:
        IRError: the value is an object, or a rank has no device that the transport joins.
    """
    if op.via is None or not fabrics.knows(op.via):
        return
    problem = None
    if _carries_objects(op):
        problem = "an object, and it carries tensors between devices alone"
    elif fabrics.joining(_ends(op)) != op.via:
        others = tuple(rank for rank in _ends(op).ranks if fabrics.of_rank(rank) != op.via)
        problem = f"a value, but {_named(others)} no device that it joins"
    if problem is not None:
        raise error(
            f"'{op.via}' is to carry {problem}",
            op=op,
            program=program,
            help="leave the choice to cg, or use cg.via(x, 'cpu')",
        )


def _carries_objects(op: Op) -> bool:
    return any(isinstance(value.type, ObjectType) for value in (*op.operands, *op.results))


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} have"
