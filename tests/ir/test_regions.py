"""The verifier's messages for slices and for tensors that are assembled."""

from __future__ import annotations

import pytest

from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify

from .valid_modules import LAID_OUT, broken

SLICE = "%x0 = slice(%x) {region = [0:2,0:4]} : f32[2,4]@0"
PACKED = "%q1 = slice(%q) {region = [2:4+8:10]} : f32[4]@1"
WHOLE = "%y = assemble(%p0) {regions = {[0:2,0:4]}} : f32[2,4]@3"
FOUR = "{[0:2,0:4], [5:8,0:4], [2:4,0:4], [4:5,0:4]}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SLICE, SLICE.replace("(%x)", "()"), "slice takes one operand, here it has 0"),
        (SLICE, SLICE.replace("%x0 =", "%x0, %x9 =") + ", unit@0", "slice makes one result"),
        (SLICE, SLICE.replace(",0:4]", "]"), "the region [0:2] has 1 dimensions, the operand has"),
        (SLICE, SLICE.replace("[0:2,", "[0:9,"), "[0:9,0:4] is not within the operand, [0:8,0:4]"),
        (SLICE, SLICE.replace("[0:2,", "[0:3,").replace("f32[2,", "f32[3,"),
         "[0:3,0:4] is not within what rank 0 holds, [0:2,0:4]"),
        (SLICE, SLICE.replace("f32[2,", "f32[3,"),
         "%x0 is f32[3,4], but the region makes f32[2,4]"),
        (SLICE, SLICE.replace("f32", "i32"), "%x0 is i32[2,4], but the region makes f32[2,4]"),
        (SLICE, SLICE.replace("@0", "@{0..1}"), "slice runs at one rank, %x0 is at @{0..1}"),
        (SLICE, SLICE.replace("@0", "@3"), "%x is at @a, but slice runs at @3"),
        (PACKED, PACKED.replace("+8:10", "+7:10").replace("[4]", "[5]"),
         "[2:4+7:10] is not within what rank 1 holds, [2:4+8:10]"),
        (WHOLE, WHOLE.replace("{[0:2,0:4]}", "{}"), "assemble has 1 operands and 0 regions"),
        (WHOLE, WHOLE.replace("[0:2,0:4]", "[0:2]"), "the region [0:2] has 1 dimensions, %y has 2"),
        (WHOLE, WHOLE.replace("[0:2,", "[0:3,"),
         "the region [0:3,0:4] is not within %y, [0:2,0:4]"),
        (WHOLE, WHOLE.replace("f32[2,4]@3", "f32[3,4]@3"),
         "4 elements of the part of rank 3, [0:3,0:4], are in no region"),
        (WHOLE, WHOLE.replace("[0:2,", "[0:1,"), "%p0 is f32[2,4], but its region has f32[1,4]"),
        (WHOLE, WHOLE.replace("f32", "i32"), "%p0 is f32[2,4], but its region has i32[2,4]"),
        (WHOLE, WHOLE.replace("@3", "@0"), "%p0 is at @3, this assemble makes a tensor at @0"),
        (WHOLE, WHOLE.replace("@3", "@{2..3}"),
         "8 elements of the part of rank 2, [0:2,0:4], are in no region"),
        (WHOLE, WHOLE.replace("[2,4]@3", "[2/*,4]@{3,2}"),
         "the region [0:2,0:4] is not within the part of rank 3, [0:1,0:4]"),
        (FOUR, FOUR.replace("[2:4,", "[1:3,"),
         "the regions [0:2,0:4] and [1:3,0:4] of the part of rank 0 have 4 elements in common"),
    ],
)  # fmt: skip
def test_regions(old: str, new: str, message: str) -> None:
    assert message in broken(LAID_OUT, old, new)


def test_a_region_in_another_form() -> None:
    module = parse_module(LAID_OUT)
    op = next(op for op in module.program.ops if op.opcode == "slice")
    op.region = (((0, 1), (1, 2)), ((0, 4),))
    with pytest.raises(Exception, match="is not a region: intervals ascend, and neither touch"):
        verify(module)


LOCAL = """module @m phase=scheduled world=1 {
  program @0(%x: f32[3,4]) {
    %a = slice(%x) {region = [0:1+2:3,0:4]} : f32[2,4]
    %b = slice(%x) {region = [1:2,0:4]} : f32[1,4]
    %y = assemble(%a, %b) {regions = {[1:3,0:4], [0:1,0:4]}} : f32[3,4]
    return(%y)
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0:1+2:3,", "0:1+3:4,", "[0:1+3:4,0:4] is not within the operand, [0:3,0:4]"),
        ("[0:1,0:4]}", "[1:2,0:4]}", "the regions [1:3,0:4] and [1:2,0:4] of the result have 4"),
        ("(%a, %b) {regions = {[1:3,0:4], [0:1,0:4]}}", "(%a) {regions = {[1:3,0:4]}}",
         "4 elements of the result, [0:3,0:4], are in no region"),
    ],
)  # fmt: skip
def test_regions_of_a_rank(old: str, new: str, message: str) -> None:
    verify(parse_module(LOCAL))
    assert message in broken(LOCAL, old, new)
