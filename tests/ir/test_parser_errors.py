"""Malformed text: each error has its line, its column, and what to write instead."""

from __future__ import annotations

import pytest

from cg.ir.text.diagnostics import IRError
from cg.ir.text.literals import parse_type
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module

TEXT = """module @m phase=traced world=2 {
  function @f(f32[2]) -> (f32[2]) {aliases = {0 -> 0}, effect = read}
  vjp @v {backward = @f, forward = @f, grad_inputs = {0}, grad_outputs = {0}}
  channel 0 {collective = true, ranks = {0..1}}
  program @m(%x: f32[2]@0) {
    %y = call(%x) {fn = @f, mb = 1} : f32[2]@0 loc("a.py":3 in f)
    %z, %w = call(%x, %y) {fn = @f} : f32[2]@0, object@{0..1}
    %c = constant() {fill = 0.5} : f32[]@0
    return(%y)
  }
}
"""


def failure(text: str) -> tuple[str, int, int, str]:
    with pytest.raises(IRError) as caught:
        parse_module(text, "in.cg")
    (diagnostic,) = caught.value.diagnostics
    span = diagnostic.span
    assert span is not None
    assert span.text == text.split("\n")[span.line - 1]
    return str(caught.value), span.line, span.column, diagnostic.help


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message", "help"),
    [
        ("module", "modul", 1, 1, "expected 'module'", "a module starts with"),
        ("phase=", "phase:", 1, 16, "expected '=' after phase, found ':'", ""),
        ("phase=traced", "world=2", 1, 11, "expected 'phase'", "module @name phase=traced"),
        ("=traced", "=tracd", 1, 17, "'tracd' is not one of traced, placed, async", ""),
        ("world=2", "world=two", 1, 30, "'two' is not a whole number", ""),
        ("world=2", "world=0", 1, 30, "a world has 1 to 131,072 ranks, not 0", ""),
        ("world=2", "world=100000000", 1, 30, "a world has 1 to 131,072 ranks, not 100000000", ""),
        ("@{0..1}", "@{0..999999999}", 7, 49, "has more than 131,072 ranks, the most that cg", ""),
        ("ranks = {0..1}", "ranks = {0..999999999}", 4, 41, "has more than 131,072 ranks", ""),
        ("%x: f32[2]", "%x: f32[99999999*4/tp]", 5, 18, "has more than 65,536 blocks", ""),
        (
            "%x: f32[2]",
            "%x: f32[9223372036854775808]",
            5,
            18,
            "dimension of more than 2**63 - 1",
            "",
        ),
        ("module @m", "module m", 1, 8, "'m' is not a symbol; write @name", ""),
        (
            "function",
            "fun",
            2,
            3,
            "'fun' is no declaration",
            "mesh, function, vjp, body, channel, program",
        ),
        ("-> (f32", "(f32", 2, 23, "expected '->' after the function's inputs", ""),
        ("(f32[2]) ->", "(future<f32[2]>) ->", 2, 15, "neither takes nor returns a future", ""),
        ("effect = read", "flops = 8", 2, 64, "write {bf16: 1024, f32: 8}", ""),
        ("effect = read", "flops = {f31: 8}", 2, 64, "'{f31: 8}' is no count of operations", ""),
        ("effect = read", "flops = {f32: 8, f32: 9}", 2, 64, "is no count of operations", ""),
        ("effect = read", "flops = {f32: 8.5}", 2, 64, "is no count of operations", ""),
        ("effect = read", "flops = {f32: 8, }", 2, 64, "is no count of operations", ""),
        ("effect = read", "flops = {f32: 8,, bf16: 9}", 2, 64, "is no count of operations", ""),
        ("effect = read", "flops = {f32: ٣}", 2, 64, "is no count of operations", ""),
        ("effect = read", f"flops = {{f32: {'9' * 5000}}}", 2, 64, "is no count of operat", ""),
        ("effect = read", "flops = {f32}", 2, 64, "is no count of operations", ""),
        ("{0 -> 0}", "{0, 0}", 2, 46, "not a set of pairs; write {0 -> 1, 1 -> 0}", ""),
        ("effect = read", "effect = reads", 2, 65, "'reads' is not one of pure, read", ""),
        ("effect", "efect", 2, 56, "'efect' is no attribute of function", "did you mean effect?"),
        ("  vjp @v", "  function @f() -> ()\n  vjp @v", 3, 12, "function f is declared twice", ""),
        ("forward = @f, ", "", 3, 63, "vjp lacks forward", "{forward = ...}"),
        ("inputs = {0}", "inputs = {-1}", 3, 54, "not a set of ranks; write {0..3,7}", ""),
        ("collective = true", "collective = yes", 4, 27, "'yes' is neither true nor false", ""),
        ("channel 0", "channel x", 4, 11, "the channel's number: 'x' is not a whole number", ""),
        ("%x: f32", "x: f32", 5, 14, "expected a value such as %x, found 'x'", ""),
        ("%x: f32[2]@0", "%x: f32@0", 5, 18, "'f32' is not a type; write f32[8,512]", ""),
        ("%x: f32[2]@0", "%x: f33[2]@0", 5, 18, "'f33' is not one of f64, f32", ""),
        ("%x: f32[2]@0", "%x: f32[a]@0", 5, 18, "'f32[a]@0' is not a type", ""),
        ("%x: f32[2]@0", "%x: f32[2,,3]@0", 5, 18, "not numbers between commas", ""),
        ("%x: f32[2]@0", "%x: f32[2]@{0,0}", 5, 18, "a place names a rank twice: (0, 0)", ""),
        ("%x: f32[2]@0", "%x: future<future<f32[2]>>", 5, 18, "is a future of a future", ""),
        ("%y = call", "%y = cal", 6, 10, "'cal' is no op", "did you mean call?"),
        ("%y = call", "%y call", 6, 8, "expected '=' after an op's results, found 'call'", ""),
        ("%y = call(%x)", "%y = call(%q)", 6, 15, "%q is used before it is defined", ""),
        ("%y = call(%x)", "%y = call(%y)", 6, 15, "%y is used before", "known are %x"),
        ("%y = call(%x)", "%x = call(%x)", 6, 5, "%x is defined twice", "give it another name"),
        ("%y = call(%x)", "%y = call(x)", 6, 15, "expected a value such as %x, found 'x'", ""),
        ("%y = call(%x)", "%y = call(%x %x)", 6, 18, "expected ',' after an operand", ""),
        ("{fn = @f, mb = 1}", "{mb = 1}", 6, 26, "call lacks fn", "{fn = ...}"),
        ("mb = 1", "mb = 1, mb = 2", 6, 37, "mb is given twice", ""),
        ("mb = 1", "mb = one", 6, 34, "'one' is not a whole number", ""),
        ("fn = @f, mb", "fn = @f mb", 6, 28, "expected ',' after an attribute", ""),
        (" : f32[2]@0 loc", " loc", 6, 37, "expected ':' after call, which has results", ""),
        ('"a.py":3', '"a.py"', 6, 59, "expected ':' after the location's file", ""),
        ("@0, object@{0..1}", "@0", 8, 5, "expected ',' after type 1 of 2", ""),
        ("object@{0..1}", "object, unit", 7, 55, "more types than the 2 results of call", ""),
        ("object@{0..1}", "object@{0..}", 7, 49, "is not a set of ranks", ""),
        ("fill = 0.5", "fill = half", 8, 29, "'half' is not a number, true or false", ""),
        ("return(%y)", "return(%y) : unit", 9, 16, "a type stands behind return", "%name = "),
        ("  }\n}\n", "  }\n", 10, 4, "the module is not closed", ""),
        ("  }\n}\n", "", 9, 15, "the program is not closed", "with }"),
        ("  }\n}\n", "  }\n}\nmore", 12, 1, "text goes on behind the module", ""),
        ('"a.py"', '"a.\\y"', 6, 52, "is not a string with JSON's escapes", ""),
        ('"a.py"', "7", 6, 52, "'7' is not a word; put it in double quotes", ""),
        ("return(%y)", "return(%)", 9, 12, "expected a value", ""),
    ],
)
def test_error(old: str, new: str, line: int, column: int, message: str, help: str) -> None:
    assert old in TEXT
    text, at_line, at_column, helps = failure(TEXT.replace(old, new, 1))
    assert message in text
    assert (at_line, at_column) == (line, column), text
    assert help in helps
    assert text.startswith(f"in.cg:{line}:{column}: error: ")


def test_the_source_is_drawn_and_underlined() -> None:
    text, *_ = failure(TEXT.replace("effect", "efect"))
    assert text.splitlines()[1:] == [
        "  2 |   function @f(f32[2]) -> (f32[2]) {aliases = {0 -> 0}, efect = read}",
        "    |                                                        ^^^^^",
        "  help: did you mean effect?",
    ]


def test_an_empty_text() -> None:
    message, line, column, _ = failure("")
    assert "expected 'module'" in message
    assert (line, column) == (1, 1)


@pytest.mark.parametrize("name", ["m", "x1"])
def test_a_scheduled_program_is_named_by_its_rank(name: str) -> None:
    text = f"module @m phase=scheduled world=1 {{\n  program @{name}() {{\n    return()\n  }}\n}}\n"
    message, line, column, help_ = failure(text)
    assert f"program @{name} is not named by a rank" in message
    assert (line, column, help_) == (2, 11, "write @0")


def test_a_task() -> None:
    message, *_ = failure(TEXT.replace("mb = 1", "task = 2G0"))
    assert "'2' is not a task; write stage, F|B|W, microbatch, as in 2F0" in message


LAID_OUT = """module @m phase=placed world=2 {
  mesh @g {dp = 2, ranks = {0..1}}
  program @m(%x: f32[8/dp,4]@g) {
    %p = slice(%x) {region = [0:4,0:4]} : f32[4,4]@0
    %y = assemble(%p) {regions = {[0:4,0:4]}} : f32[4,4]@0
    return()
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message", "help"),
    [
        ("{dp = 2, ranks", "{ranks", 2, 26, "has 2 ranks, which its axes are not: no axes", "the"),
        ("dp = 2", "dp = 3", 2, 34, "mesh @g has 2 ranks, which its axes are not: dp = 3", "the"),
        ("dp = 2", "dp = 2, dp = 1", 2, 42, "mesh @g has two axes of one name: dp, dp", "the"),
        ("mesh @g", "mesh @ranks", 2, 38, "'ranks' is no name for a mesh or an axis", "the"),
        ("/dp,4]@g", "/dp,4]@h", 3, 18, "the module declares no mesh @h; it has @g", ""),
        ("8/dp", "2*4", 3, 18, "each with the axes that cut it behind a slash", ""),
        ("8/dp", "0*4/dp", 3, 18, "has a dimension of 0 blocks", ""),
        ("8/dp,4", "8/dp,4|tp", 3, 18, "has summands that are not of the form |+tp", ""),
        ("8/dp,4", "8/dp,4|sub:tp", 3, 18, "'sub' is not one of sum, avg, prod, min, max", ""),
        ("region = [0:4,0:4]", "region = {0..1}", 4, 30, "'{0..1}' is no region; write [0:4", ""),
        ("[0:4,0:4]}", "[0:4,0]}", 4, 30, "'0' is not the indices of a dimension; write", ""),
        ("[0:4,0:4]}", "[0:4,]}", 4, 30, "'' is not the indices of a dimension; write", ""),
        ("[0:4,0:4]}", "[4:0,0:4]}", 4, 30, "'4:0' is not the indices of a dimension", ""),
        ("[0:4,0:4]}", "[2:4+0:1,0:4]}", 4, 30, "'2:4+0:1' is not the indices of a dime", ""),
        ("{[0:4,0:4]}", "[0:4,0:4]", 5, 34, "is not a set of regions; write {[0:4,0:64]", ""),
        ("{[0:4,0:4]}", "{[0:4] [0:4]}", 5, 34, "is not a set of regions; write", ""),
    ],
)
def test_errors_of_layouts_and_regions(
    old: str, new: str, line: int, column: int, message: str, help: str
) -> None:
    assert old in LAID_OUT
    text, at_line, at_column, helps = failure(LAID_OUT.replace(old, new, 1))
    assert message in text
    assert (at_line, at_column) == (line, column), text
    assert help in helps


def test_adjacent_and_empty_intervals_are_read_as_they_are_written() -> None:
    text = LAID_OUT.replace("region = [0:4,0:4]", "region = [0:2+2:4, 1:1 ]")
    assert "{region = [0:4,0:0]}" in format_module(parse_module(text))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        "future<",
        "a[",
        "f32[1]@{1",
        '\\"',
        '"\\"',
        "{1",
        "{[",
        "{a: 1,",
        "{a: a,",
        "{a",
        "1,",
        "a.",
        " {",
    ],
)
@pytest.mark.parametrize("before", ["program @m(%x: ", "channel 0 {ranks = {", 'x "'])
def test_what_does_not_end_is_an_error_in_time_that_is_linear(part: str, before: str) -> None:
    """A search that begins again at each of so many parts would take an hour."""
    with pytest.raises(IRError):
        parse_module("module @m phase=placed world=2 {\n" + before + part * 100_000)


def test_many_futures_of_futures() -> None:
    many = "future<" * 5_000 + "f32[2]" + ">" * 5_000
    with pytest.raises(IRError, match="not a type"):
        parse_module(TEXT.replace("f32[2]@0", many, 1))
    with pytest.raises(ValueError, match="is a future of a future"):
        parse_type(many)
