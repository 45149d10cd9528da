"""The wheel's package list is written by hand; it must name what the tree holds."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cg.backends.cpu.memory.native import native
from cg.launch.pictures.model import Picture
from cg.launch.pictures.timeline_html import timeline_html

ROOT = Path(__file__).resolve().parent.parent
IS_WHEEL = Path(str(importlib.import_module("cg").__file__)).resolve().parent != ROOT
ROOMS = ("ir", "tracer", "passes", "backends", "launch")


def declared() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return set(config["options"]["packages"].split())


def test_every_package_of_the_tree_is_declared() -> None:
    tree = {"cg"}
    for room in ROOMS:
        for folder in (ROOT / room, *(p for p in (ROOT / room).rglob("*") if p.is_dir())):
            if any(folder.glob("*.py")):
                assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"
                tree.add(".".join(("cg", *folder.relative_to(ROOT).parts)))
    assert declared() == tree


def test_every_module_of_the_tree_is_installed() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    for file in files:
        name = ".".join(("cg", *file.relative_to(ROOT).with_suffix("").parts))
        assert importlib.util.find_spec(name.removesuffix(".__init__")) is not None, name


def test_files_that_are_no_modules_are_declared() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = {
        (package, file)
        for package, files in config["options.package_data"].items()
        for file in files.split()
    }
    found = {("cg", "py.typed")}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                package = ".".join(("cg", *file.parent.relative_to(ROOT).parts))
                found.add((package, file.name))
    assert listed == found


def test_pages_find_what_they_are_made_from() -> None:
    assert "<canvas" in timeline_html(Picture("empty", ()))


def test_no_stray_module_at_the_root() -> None:
    # It would ship in the wheel, as cg.<name>; setup.py leaves itself out.
    assert {file.name for file in ROOT.glob("*.py")} == {"__init__.py", "setup.py"}


@pytest.mark.skipif(not IS_WHEEL, reason="tests the checkout, whose root is the package")
def test_how_wheels_are_built_is_not_in_them() -> None:
    assert importlib.util.find_spec("cg.setup") is None


def compiled_modules() -> set[Path]:
    """The modules that setup.py can make machine code of."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    )
    assert len(found) == len(set(found))
    return {ROOT / name for name in found}


def classes(modules: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    """Each class, with the names of what it extends."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, [ast.unparse(base).split("[")[0] for base in node.bases]


def extensible(modules: Iterable[Path]) -> set[str]:
    """Compiled classes that say to the compiler that others extend them."""
    return {
        node.name
        for module in modules
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator) == "mypyc_attr(allow_interpreted_subclasses=True)"
    }


def test_what_is_compiled_can_be() -> None:
    # See docs/design/0033-compiled-modules.md.
    modules = compiled_modules()
    everything = {file for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert modules < everything
    names = {name for name, _ in classes(modules)}
    for name, bases in classes(modules):
        assert not any(base.endswith(("Error", "Exception")) for base in bases), name
    closed = names - extensible(modules)
    for name, bases in classes(everything - modules):
        assert closed.isdisjoint(bases), f"{name} extends a compiled class, and is not compiled"


def test_compiled_constructors_get_no_starred_tuple() -> None:
    """Mypyc gives the whole of it to the first parameter, where it knows the constructor."""
    for module in sorted(compiled_modules()):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                starred = [arg for arg in node.args if isinstance(arg, ast.Starred)]
                assert not starred, f"{module}:{node.lineno}: name the arguments one by one"


def test_compiled_modules_are_machine_code_in_a_compiled_wheel() -> None:
    names = [
        ".".join(("cg", *m.relative_to(ROOT).with_suffix("").parts)) for m in compiled_modules()
    ]
    suffixes = {Path(str(importlib.import_module(name).__file__)).suffix for name in names}
    is_compiled = importlib.util.find_spec("cg__mypyc") is not None
    assert suffixes == ({".so"} if is_compiled else {".py"})
    assert (native is not None) == is_compiled
