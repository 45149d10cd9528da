"""Imports between rooms, and the size and names of files, read from the source.

Every import counts, also inside of functions.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
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
# What one folder of a room may import beside that: the library that it is the adapter of.
OWN_PACKAGES = {"launch/conversions": {"transformers"}, "launch/models": {"transformers"}}
THIRD_PARTY = {"torch", "numpy", "mpi4py", "cupy", "nccl", "torch_npu", "transformers"}

MOST_FILES = 16
"""Modules in a folder."""
MOST_LINES = 450
"""Lines in a module."""
SAME_THING = {
    "base.py": "the protocol or the base class of what the folder holds",
    "binder.py": "on the host and on devices",
    "builtins.py": "declarations in the IR, and what runs for them",
    "capture.py": "the pass, and the device's part of it",
    "collectives.py": "what users call, and its meaning in each transport",
    "communicator.py": "in each transport",
    "device.py": "what the run time needs of an accelerator, and the fake one",
    "errors.py": "of the tracer, and of what runs",
    "flops.py": "counts in the IR, and of torch's ops",
    "fuse.py": "the pass, and the compiler that it asks for",
    "instance.py": "on the host and on devices",
    "instructions.py": "on the host and on devices",
    "layout.py": "of a tensor over ranks, and of a rank's shared memory",
    "library.py": "the protocol, and those behind it: NCCL, HCCL, and that of fake devices",
    "partition.py": "cuts a graph: into forward and backward, and where ranks exchange something",
    "pool.py": "in each transport between devices",
    "ports.py": "in each transport",
    "registry.py": "of passes, and of transports",
    "segments.py": "of shared memory, and of a device's program: to be told apart",
    "waiting.py": "for queues, and for MPI",
    "world.py": "the virtual world, and the world of this process",
}
"""Names that several modules have, with the thing that they are in each place."""


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


def arrows(room: str) -> dict[str, dict[str, str]]:
    """For each folder of a room the folders that its own modules import, with one such import."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((ROOT / room).rglob("*.py")):
        folder = str(file.parent.relative_to(ROOT))
        for line, name in imports(file):
            target = folder_of(name)
            if target is not None and target != folder and target.split("/")[0] == room:
                where = f"{file.relative_to(ROOT)}:{line} imports {name}"
                found.setdefault(folder, {}).setdefault(target, where)
    return found


def folder_of(name: str) -> str | None:
    """The folder of the module of a dotted name, `cg.room.….module.thing`; None for others."""
    path = ROOT.joinpath(*name.split(".")[1:])
    while name.startswith("cg.") and path != ROOT:
        if path.with_suffix(".py").is_file():
            return str(path.parent.relative_to(ROOT))
        if (path / "__init__.py").is_file():
            return str(path.relative_to(ROOT))
        path = path.parent
    return None


def circle(graph: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Imports that lead from a folder back to it; none if there is no circle."""
    done: set[str] = set()

    def visit(folder: str, path: list[str]) -> list[str]:
        if folder in path:
            around = [*path[path.index(folder) :], folder]
            return [graph[a][b] for a, b in itertools.pairwise(around)]
        if folder in done:
            return []
        for target in graph.get(folder, {}):
            if found := visit(target, [*path, folder]):
                return found
        done.add(folder)
        return []

    return next((found for folder in graph if (found := visit(folder, []))), [])


@pytest.mark.parametrize("room", ROOMS)
def test_folders_have_no_circles(room: str) -> None:
    assert circle(arrows(room)) == []


FLOORS = ("values", "method", "graph", "function", "record")
"""The folders of the tracer: each imports those in front of it alone."""


def test_the_tracer_has_five_floors() -> None:
    found = arrows("tracer")
    assert {folder.split("/")[1] for folder in found if "/" in folder} <= set(FLOORS)
    against = [
        where
        for folder, targets in found.items()
        for target, where in targets.items()
        if "/" in target and ("/" not in folder or _floor(target) > _floor(folder))
    ]
    assert against == []


def _floor(folder: str) -> int:
    return FLOORS.index(folder.split("/")[1])


def modules() -> list[Path]:
    found = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    return sorted(file.relative_to(ROOT) for file in found)


def test_folders_hold_few_modules() -> None:
    counts = Counter(str(file.parent) for file in modules())
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_modules_are_short() -> None:
    lengths = {str(file): len((ROOT / file).read_text().splitlines()) for file in modules()}
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}


def test_modules_of_one_name_are_one_thing() -> None:
    names = Counter(file.name for file in modules() if not file.name.startswith("__"))
    several = {name for name, count in names.items() if count > 1}
    new, gone = sorted(several - SAME_THING.keys()), sorted(SAME_THING.keys() - several)
    assert new + gone == [], f"rename {new}, or take {gone} from SAME_THING"


SAME_CLASS = {
    "CollectivePort": "in each transport",
    "GraphBody": "as the tracer makes it, and as what runs needs it",
    "InputError": "of a step that is called, and of an execution",
    "MpiWorld": "as backends need it, and as it is",
}
"""Names that several classes have, with the thing that they are in each place."""


def test_a_name_of_a_class_has_one_owner() -> None:
    names = Counter(
        node.name.lstrip("_")
        for file in modules()
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == SAME_CLASS.keys()


def test_the_environment_is_read_in_one_module() -> None:
    readers = set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
                    readers.add(str(file.relative_to(ROOT)))
    assert readers <= {"launch/environment/config.py"}


def test_a_circle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (("a", "from ..b import y\n"), ("b", "if 1:\n    from ..c.z import q\n")):
        (tmp_path / "ir" / folder).mkdir(parents=True)
        (tmp_path / "ir" / folder / "x.py").write_text(text)
        (tmp_path / "ir" / folder / "__init__.py").touch()
    (tmp_path / "ir" / "c").mkdir()
    (tmp_path / "ir" / "c" / "z.py").write_text("from ..a.x import w\n")
    monkeypatch.setitem(circle.__globals__, "ROOT", tmp_path)
    assert circle(arrows("ir")) == [
        "ir/a/x.py:1 imports cg.ir.b.y",
        "ir/b/x.py:2 imports cg.ir.c.z.q",
        "ir/c/z.py:1 imports cg.ir.a.x.w",
    ]


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
