"""The wheel's package list is written by hand; it must name what the tree holds."""

from __future__ import annotations

import configparser
from pathlib import Path

from cg.launch.pictures.html import timeline_html
from cg.launch.pictures.model import Picture

ROOT = Path(__file__).resolve().parent.parent
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
    # It would ship in the wheel, as cg.<name>.
    assert [file.name for file in ROOT.glob("*.py")] == ["__init__.py"]
