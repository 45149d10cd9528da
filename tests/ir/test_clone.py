"""A clone is equal to its original and shares nothing that a pass may change."""

from __future__ import annotations

from cg.ir.attributes import Symbol
from cg.ir.ops import Call, Return, Value
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Function, Module, Program
from cg.ir.phases import Phase
from cg.ir.types import DType, Mesh, Place, TensorType


def small() -> Module:
    type_ = TensorType(DType.F32, (2,), Place((0,)))
    local = TensorType(DType.F32, (2,))
    x, y = Value("x", type_), Value("y", type_)
    call = Call((x,), (y,), fn=Symbol("f"), mb=0)
    program = Program("step", [x], [call, Return((y,), at=Place((0,)))])
    functions = {"f": Function("f", (local,), (local,))}
    meshes = {"m": Mesh((0,), "m", (("dp", 1),))}
    return Module("step", Phase.TRACED, 1, meshes, functions, programs=[program])


def test_a_clone_is_equal() -> None:
    assert clone(small()) == small()


def test_changing_a_clone_leaves_the_original_alone() -> None:
    module = small()
    other = clone(module)
    other.program.ops[0].mb = 7
    other.program.params[0].name = "z"
    other.program.ops.pop()
    other.functions.clear()
    other.meshes.clear()
    assert module == small()
    assert other.program.ops[0].operands[0] is other.program.params[0]
