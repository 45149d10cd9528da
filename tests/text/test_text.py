"""Run the cases of tests/text/*.cg through cg-opt; README.md beside this file has the format."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.launch.tools import opt

HERE = Path(__file__).resolve().parent
CASE = re.compile(r"^// ==== (.*)\n", re.MULTILINE)
EXPECTED = "// ---- expected\n"


@dataclass(frozen=True)
class Case:
    file: Path
    index: int
    name: str
    command: tuple[str, ...]
    source: str
    expected: str | None

    def says(self, key: str) -> list[str]:
        return re.findall(rf"^\s*// {key}: (.*?)\s*$", self.source, re.MULTILINE)


def read_cases(file: Path) -> list[Case]:
    parts = CASE.split(file.read_text())
    # What stands before the first `// ====` is a case too; otherwise it is only introduction.
    named = list(zip(["first", *parts[1::2]], parts[0::2], strict=True))
    default = run_line(parts[0]) or ()
    cases = []
    for index, (name, text) in enumerate(named):
        source, separator, expected = text.partition(EXPECTED)
        command = run_line(source) or default
        case = Case(file, index, name, command, source, expected if separator else None)
        if index > 0 or re.search(r"^module\b", source, re.MULTILINE):
            cases.append(case)
    return cases


def run_line(text: str) -> tuple[str, ...] | None:
    found = re.search(r"^// RUN: (cg-opt\b.*)$", text, re.MULTILINE)
    return tuple(shlex.split(found[1])) if found else None


def write_expected(case: Case, output: str) -> None:
    """Put `output` into the case's expected section; the other cases stay as they are."""
    parts = CASE.split(case.file.read_text())
    last = 2 * case.index == len(parts) - 1
    parts[2 * case.index] = case.source.rstrip("\n") + "\n" + EXPECTED + output
    if not last:
        parts[2 * case.index] += "\n"
    titles = [f"// ==== {part}\n" if i % 2 else part for i, part in enumerate(parts)]
    case.file.write_text("".join(titles))


FILES = sorted(HERE.glob("*.cg"))
CASES = [
    pytest.param(case, id=f"{file.stem}: {case.name}")
    for file in FILES
    for case in read_cases(file)
]


def check(
    case: Case, directory: Path, capsys: pytest.CaptureFixture[str], *, update: bool = False
) -> None:
    source = directory / case.file.name
    source.write_text(case.source)
    assert case.command, f"{case.file.name} has no `// RUN: cg-opt ...`"
    status = opt.main([*case.command[1:], str(source)])
    out, err = capsys.readouterr()
    if errors := case.says("expected-error"):
        assert (status, out) == (1, ""), "expected an error"
        for text in errors:
            assert text in err
        return
    assert status == 0, err
    for text in case.says("expected-stderr"):
        assert text in err
    assert format_module(parse_module(out), "--locations" in case.command) == out
    if update:
        write_expected(case, out)
        return
    assert case.expected is not None, "no `// ---- expected`; --update-golden writes one"
    assert out.strip() == case.expected.strip()


@pytest.mark.parametrize("case", CASES)
def test_case(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    check(case, tmp_path, capsys, update=request.config.getoption("--update-golden"))


# The harness itself: a case that should fail does.

MODULE = """module @m phase=traced world=1 {
  program @m(%x: f32[2]@0) {
    return(%x)
  }
}
"""


def one_case(directory: Path, text: str) -> Case:
    file = directory / "one.cg"
    file.write_text(text)
    (case,) = read_cases(file)
    return case


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"// RUN: cg-opt\n{MODULE}", "no `// ---- expected`"),
        (f"// RUN: cg-opt\n{MODULE}{EXPECTED}{MODULE.replace('%x', '%y')}", "assert"),
        (f"// RUN: cg-opt\n// expected-error: no\n{MODULE}", "expected an error"),
        (f"// RUN: cg-opt\n{MODULE.replace('return', 'retrun')}{EXPECTED}", "is no op"),
        (f"// RUN: cg-opt\n// expected-error: tea\n{MODULE.replace('ret', 'tre')}", "'tea'"),
        (f"{MODULE}{EXPECTED}{MODULE}", "has no `// RUN"),
    ],
)
def test_a_wrong_case_fails(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(one_case(tmp_path, text), tmp_path, capsys)


def test_update_writes_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "two.cg"
    file.write_text(f"// RUN: cg-opt\n// ==== a\n{MODULE}// ==== b\n{MODULE}{EXPECTED}old\n")
    work = tmp_path / "work"
    work.mkdir()
    for index in range(2):
        check(read_cases(file)[index], work, capsys, update=True)
    for case in read_cases(file):
        check(replace(case), work, capsys)
    assert "old" not in file.read_text()
    assert [case.name for case in read_cases(file)] == ["a", "b"]
