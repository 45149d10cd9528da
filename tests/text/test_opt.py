"""cg-opt as a command: standard input, exit status, and no need for torch or MPI."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

import cg
from cg.launch.tools import opt
from cg.passes.manager import registry

MODULE = """module @m phase=traced world=1 {
  program @m(%x: f32[2]@0) {
    return(%x)
  }
}
"""
BLOCKED = """
import sys
for name in ("torch", "mpi4py", "numpy"):
    sys.modules[name] = None
from cg.launch.tools.opt import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(Path(cg.__file__).parent.parent)},
    )


def test_it_needs_neither_torch_nor_mpi() -> None:
    done = run("-", "--passes", "dce", stdin=MODULE)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout == MODULE


def test_an_error_is_on_stderr_with_status_1() -> None:
    done = run("-", stdin=MODULE.replace("return", "retrun"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("<stdin>:3:5: error: 'retrun' is no op")
    assert "help: did you mean return?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert opt.main(["/nowhere/x.cg"]) == 1
    assert "error: [Errno 2] No such file or directory: '/nowhere/x.cg'" in capsys.readouterr().err


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.cg"
    file.write_bytes(b"\xff\xfe\x00")
    assert opt.main([str(file)]) == 1
    said = capsys.readouterr().err
    assert "is not a text file: 'utf-8' codec can't decode" in said
    assert str(tmp_path) in said


def test_the_list_names_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert opt.main(["--list-passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split("  ")[0].split("{")[0] for line in lines if not line.startswith(" ")]
    assert listed == list(registry.names())
    assert "insert-transfers" in listed


def test_an_unknown_option_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(MODULE))
    assert opt.main(["--passes", "dce{fast=true}"]) == 1
    assert "pass 'dce' has no option 'fast'" in capsys.readouterr().err


def test_print_between_shows_each_module_that_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unused = "    %c = constant() {fill = 1} : f32[]@0\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(MODULE.replace("    ret", f"{unused}    ret")))
    assert opt.main(["--passes", "dce,dce", "--print-between", "--time-passes"]) == 0
    out, err = capsys.readouterr()
    assert out == MODULE
    assert f"// ---- after dce\n{MODULE}// ---- after dce: unchanged\n" in err
    assert err.count(" ms  ") == 3


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("schedule{schedule=zb-v}", "schedule 'zb-v' wants 2 stages on each of 2 ranks"),
        ("schedule{prefetch=-1}", "pass 'schedule': prefetch is at least 0, not -1"),
        (
            "schedule{tasks_in_flight=0}",
            "pass 'schedule': tasks_in_flight is at least 1, not 0",
        ),
        ("overlap{lookahead=0}", "pass 'overlap': lookahead is at least 1, not 0"),
    ],
)
def test_options_that_do_not_fit_are_errors(
    passes: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).with_name("schedule.cg")
    module = file.read_text().partition("// ----")[0]
    status, err = piped(module, "--passes", passes, capsys=capsys)
    assert status == 1
    assert err.startswith(f"error: {message}")


def piped(text: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the messages of the tool on a module from standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(text))
        status = opt.main(list(arguments))
    return status, capsys.readouterr().err
