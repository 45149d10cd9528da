"""The collector of documented commands: it loses none, and brings them down to few GPUs."""

from __future__ import annotations

import pytest

from . import documented
from .cases import cases, left_out, runnable, without_room
from .documented import Shown, parse, shown
from .fitting import fit
from .left_out import RULES, reason


def test_every_documented_command_is_run_or_left_out_with_a_reason() -> None:
    """`runnable` refuses a command that is neither."""
    run = [line for line, _ in runnable() if line.file != "tests/gpu/cases.py"]
    without = [each.shown for each in left_out()]
    assert sorted(map(str, run + without)) == sorted(map(str, shown()))
    assert len(run) > 25


def test_every_example_is_run() -> None:
    run = {command.name for _, command in runnable()}
    programs = {
        example.stem
        for example in (documented.ROOT / "examples").glob("*.py")
        if '__name__ == "__main__"' in example.read_text("utf-8")
    }
    assert programs - run == {"demo_model"}, "a program without a command in its docstring"
    assert {"serve", "zero_bubble"} <= run


def test_every_rule_leaves_something_out() -> None:
    used = {each.reason for each in left_out()}
    assert [rule.reason for rule in RULES if rule.reason not in used] == []


def test_a_command_that_is_not_understood_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Shown("torchrun train.py", "docs/new.md", 7)
    monkeypatch.setattr("tests.gpu.cases.shown", lambda: (new,))
    with pytest.raises(ValueError, match=r"docs/new.md:7: 'torchrun train.py' starts no Python"):
        runnable()


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_every_command_fits(gpus: int) -> None:
    """Each is run in some way, but for those whose options need two ranks."""
    found = cases(gpus)
    assert len({case.id for case in found}) == len(found)
    assert all(case.command.ranks <= gpus for case in found)
    assert bool(without_room(gpus)) is (gpus == 1)


@pytest.mark.parametrize(
    ("text", "gpus", "fitted"),
    [
        ("mpirun -n 8 python x.py", 2, ["mpirun -n 2 python x.py"]),
        ("mpirun -n 2 python x.py", 4, ["mpirun -n 2 python x.py"]),
        ("CG_RANKS=8 python x.py", 1, ["CG_RANKS=8 python x.py"]),
        (
            "python -m cg.launch -n 8 x.py --tp 2 --dp 2",
            2,
            ["python -m cg.launch -n 2 x.py --tp 2", "python -m cg.launch -n 2 x.py --dp 2"],
        ),
        (
            "mpirun -n 8 python x.py --tp 2 --dp 2 --fsdp",
            2,
            ["mpirun -n 2 python x.py --dp 2 --fsdp"],
        ),
        ("mpirun -n 8 python x.py --tp 2 --dp 2 --fsdp", 1, []),
        ("mpirun -n 8 python x.py --tp 2", 5, ["mpirun -n 4 python x.py --tp 2"]),
        (
            "mpirun -n 8 python examples/finetune.py --pp 2 --dp 2 --tp 2",
            4,
            [
                f"mpirun -n 4 python examples/finetune.py {axes}"
                for axes in ("--pp 1 --dp 2 --tp 2", "--pp 2 --tp 2", "--pp 2 --dp 2")
            ],
        ),
        (
            "python -m examples.serve --model DIR -n 4 --tp 2",
            1,
            ["python -m examples.serve -n 1 --model DIR"],
        ),
        (
            "python -m examples.serve --model DIR -n 8 --tp 2 --ep 2",
            2,
            [f"python -m examples.serve -n 2 --model DIR --{axis} 2" for axis in ("tp", "ep")],
        ),
    ],
)
def test_what_is_left_on_few_gpus(text: str, gpus: int, fitted: list[str]) -> None:
    command = parse(text)
    assert command is not None
    assert sorted(map(str, fit(command, gpus))) == sorted(fitted)


def test_shell_is_read_as_commands() -> None:
    found = [each.text for each in shown() if each.file == "docs/guide/dumps.md"]
    assert "cg-opt --list-passes" in found
    assert any(text.startswith("cg-opt") and "uniq" in text for text in found), "over two lines"
    here = [each for each in shown() if each.file == "docs/guide/trace-errors.md"]
    assert [each.text.partition(" ")[0] for each in here] == ["cat", "cg-opt"], "a document is one"
    first = next(each for each in shown() if each.file == "README.md")
    text = (documented.ROOT / "README.md").read_text("utf-8").splitlines()
    assert text[first.line - 1].startswith(first.text)


@pytest.mark.parametrize("text", ["python x.py | tail", "ls dumps", "python -c 'pass'", "echo 'a"])
def test_what_is_no_program_alone_is_not_parsed(text: str) -> None:
    assert parse(text) is None


def test_the_first_rule_that_fits_gives_the_reason() -> None:
    assert reason(Shown("python examples/clip.py", "README.md", 1)) is None
    assert "NPU" in str(reason(Shown("python x.py", "docs/backends/hccl.md", 1)))
    assert "network" in str(reason(Shown("make train", "README.md", 1)))
