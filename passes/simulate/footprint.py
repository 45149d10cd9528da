"""The most bytes of values that a rank's program holds, read off its `free` ops."""

from __future__ import annotations

from ...ir.module import Module, Program
from ...ir.ops import Call, Constant, Free, Op, Recv, Send, Value, View, Wait
from ...ir.types import FutureType, TensorType


def peak_bytes(module: Module, program: Program) -> int:
    """The most bytes of tensors that a rank holds at once.

    Counted are the step's inputs, what the program makes until it is freed, and the slots of the
    channels that the rank receives from. Not counted are objects, whose size nobody knows, and
    what actors and the step own: weights, gradients, constants.
    """
    storages = _Storages(module)
    for value in program.params:
        storages.make(value)
    for index, op in enumerate(program.ops):
        storages.visit(index, op)
    held = most = sum(storages.sizes.get(value, 0) for value in program.params)
    for index in range(len(program.ops)):
        held += storages.made_at.get(index, 0)
        most = max(most, held)
        held -= storages.freed_at(index)
    return most + sum(
        (channel.slots or 0) * (channel.slot_bytes or 0)
        for channel in module.channels.values()
        if not channel.collective and channel.ranks[1] == program.rank
    )


class _Storages:
    """The storages of values: which share one, its size, when it is made and when freed.

    Attributes:
        sizes: bytes of each storage, by the value that brought it in.
        made_at: bytes that each op brings in.
    """

    def __init__(self, module: Module) -> None:
        self._functions = module.functions
        self._root: dict[Value, Value] = {}
        self._last_use: dict[Value, int] = {}
        self._last_free: dict[Value, int] = {}
        self._promise: dict[Value, Op] = {}
        self._frees: dict[int, int] | None = None
        self.sizes: dict[Value, int] = {}
        self.made_at: dict[int, int] = {}

    def make(self, value: Value, index: int | None = None) -> None:
        """A value comes with storage of its own."""
        type_ = value.type.value if isinstance(value.type, FutureType) else value.type
        size = type_.nbytes if isinstance(type_, TensorType) else 0
        self._root[value] = value
        self.sizes[value] = size
        if index is not None:
            self.made_at[index] = self.made_at.get(index, 0) + size

    def visit(self, index: int, op: Op) -> None:
        """Note what an op brings in, shares, uses and frees; ops come in order."""
        if isinstance(op, Free):
            self._last_free[self._root_of(op.operands[0])] = index
            return
        for value in op.operands:
            self._last_use[self._root_of(value)] = index
        if isinstance(op, View | Wait) and op.results:
            self._root[op.result] = self._root_of(op.operands[0])
        elif isinstance(op, Call):
            shared = dict(self._functions[op.fn.name].aliases)
            for position, value in enumerate(op.results):
                if position in shared:
                    self._root[value] = self._root_of(op.operands[shared[position]])
                else:
                    self.make(value, index)
        elif isinstance(op, Recv) and op.operands:
            self._root[op.result] = self._root_of(op.operands[0])
        elif not isinstance(op, Send) and not _is_elsewhere(op):
            for value in op.results:
                self.make(value, index)

    def freed_at(self, index: int) -> int:
        """Bytes that go with an op, once all ops have been visited."""
        if self._frees is None:
            self._frees = {}
            for root, at in self._last_free.items():
                if self._last_use.get(root, -1) < at:
                    self._frees[at] = self._frees.get(at, 0) + self.sizes.get(root, 0)
        return self._frees.get(index, 0)

    def _root_of(self, value: Value) -> Value:
        return self._root.get(value, value)


def _is_elsewhere(op: Op) -> bool:
    """Whether what an op gives is counted as a slot, or belongs to the step."""
    return (isinstance(op, Recv) and op.slot is not None) or (
        isinstance(op, Constant) and op.ref is not None
    )
