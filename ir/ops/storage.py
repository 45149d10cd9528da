"""Group the values of a program that share storage."""

from __future__ import annotations

from collections.abc import Mapping

from ..disjoint_sets import DisjointSets
from . import Call, Collective, Value
from .module import Function, Program


class SharedStorage(DisjointSets[Value]):
    """The groups of a program's values that share storage, by union-find.

    A value shares storage with its views, with the results of waits for it, and with the future
    that promised it. It also shares storage with the buffer that it was received or copied into,
    and with the tensor that is assembled in it. So does the result of an `all_reduce` to which it
    is donated, and so do the results of calls that may alias it.

    Args:
        program: the program.
        functions: the functions of its module, by name.
        collectives: whether the result of a collective at its root shares storage with the root's
            operand. The proof of progress says no: there a slot is free as soon as the value that
            came in it is freed.
    """

    def __init__(
        self, program: Program, functions: Mapping[str, Function], collectives: bool = False
    ) -> None:
        super().__init__()
        for op in program.ops:
            if isinstance(op, Call):
                function = functions.get(op.fn.name)  # the verifier says where one is missing
                for output, operand in function.aliases if function is not None else ():
                    self.join(op.results[output], op.operands[operand])
            elif collectives or not isinstance(op, Collective):
                shared = op.shared_operand
                if shared is not None and op.results:
                    self.join(op.results[0], shared)
