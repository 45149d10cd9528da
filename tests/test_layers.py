"""Who may import whom, read from the source: every import counts, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ir", "tracer", "passes", "backends", "launch")
ALLOWED = {
    "ir": {"ir"},
    "tracer": {"tracer", "ir"},
    "passes": {"passes", "ir"},
    "backends": {"backends", "ir"},
    "launch": set(ROOMS),
}
# Third-party packages a room may import at all.
PACKAGES = {
    "ir": set(),
    "passes": set(),
    "tracer": {"torch", "numpy"},
    "backends": {"torch", "numpy"},
    "launch": {"torch", "numpy", "mpi4py"},
}
# What one folder of a room may import beside that: the library that it is the binding of.
OWN_PACKAGES = {"backends/nccl": {"cupy", "nccl"}}
THIRD_PARTY = {"torch", "numpy", "mpi4py", "cupy", "nccl", "torch_npu", "transformers"}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved to `cg.…`."""
    package = ("cg", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module or "").split(".") if node.module else ())))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def violations(room: str) -> list[str]:
    found = []
    for file in sorted((ROOT / room).rglob("*.py")):
        for line, name in imports(file):
            head, *rest = name.split(".")
            where = f"{file.relative_to(ROOT)}:{line} imports {name}"
            if head == "cg" and (not rest or (rest[0] in ROOMS and rest[0] not in ALLOWED[room])):
                found.append(where)
            own = OWN_PACKAGES.get(str(file.parent.relative_to(ROOT)), set())
            if head in THIRD_PARTY and head not in PACKAGES[room] | own:
                found.append(where)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_their_floors(room: str) -> None:
    assert violations(room) == []


def test_the_environment_is_read_in_one_module() -> None:
    readers = set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
                    readers.add(str(file.relative_to(ROOT)))
    assert readers <= {"launch/config.py"}


def test_an_arrow_against_the_floors_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "passes"
    room.mkdir()
    (room / "bad.py").write_text("def f():\n    from ..tracer import trace\n    import torch.fx\n")
    globals_ = violations.__globals__
    monkeypatch.setitem(globals_, "ROOT", tmp_path)
    assert violations("passes") == [
        "passes/bad.py:2 imports cg.tracer.trace",
        "passes/bad.py:3 imports torch.fx",
    ]
