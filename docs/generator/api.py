"""The public names, with their docstrings, in the groups in which `__init__.py` lists them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cg
from cg.backends.timing.statistics import Statistics
from cg.launch.api.compiled_programs import Cost, Programs
from cg.launch.api.repeated import Repeated
from cg.launch.checkpoints.weights import Weights
from cg.launch.measure.profiling import Profile
from cg.launch.models.cut_model import Cuts, StageOfModel
from cg.launch.models.part import ModelPart
from cg.passes.simulate.memory_plan import MemoryPlan
from cg.passes.simulate.program_times import ProgramTimes, RankTimes
from cg.tracer.record.actors.factory import ActorFactory

from .docstrings import first_sentence, to_markdown
from .examples import examples
from .see import SEE

_GROUP = re.compile(r'^    # (.+)$|^    "(\w+)": ', re.MULTILINE)


PAGES = {
    "program": "Writing a program",
    "models": "Models of other libraries",
    "world": "The world",
    "compiled": "What compiling gives",
    "costs": "What it costs",
    "errors": "What can go wrong",
}
"""The page of each group of names, in `docs/reference/api`."""

_TOLD = (Statistics, MemoryPlan, Cost, ProgramTimes, RankTimes, Repeated, Profile)
"""What methods of `Compiled` return; no public names, since users make none of them."""

_OF_MODELS = (Cuts, StageOfModel, ModelPart, Weights)
"""What `cg.cut_layers` and `cg.pretrained` return."""


def index() -> str:
    """A line for each name of `cg.__all__`, with a link to it."""
    groups = dict(_groups())
    listed = [name for names in groups.values() for name in names]
    if sorted(listed) != sorted(cg.__all__):
        raise KeyError(f"in one of __all__ and _HOMES only: {set(listed) ^ set(cg.__all__)}")
    if set(groups) != set(PAGES.values()):
        raise KeyError(f"a group without a page, or the other way: {set(groups)}")
    parts = []
    for page, title in PAGES.items():
        rows = ["| name | is |", "|---|---|"]
        for name in groups[title]:
            link = f"[`cg.{name}`](api/{page}.md#cg{name.lower()})"
            rows.append(f"| {link} | {first_sentence(_doc(getattr(cg, name)))} |")
        parts += [f"## [{title}](api/{page}.md)", "\n".join(rows)]
    return "\n\n".join(parts)


def group(page: str) -> str:
    """The names of one page, with their docstrings."""
    names = dict(_groups())[PAGES[page]]
    shown = examples()
    parts = []
    for name in names:
        value = getattr(cg, name)
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if name not in shown and not is_error:
            raise KeyError(f"docs/api_examples.py has no example of cg.{name}")
        example = f"\n\n*Example*:\n\n{shown[name]}" if name in shown else ""
        more = f"\n\n*See*: [{_title(SEE[name])}](../../{SEE[name]})"
        parts.append(f"## cg.{name}\n\n{_describe(name, value)}{example}{more}")
    told = {"compiled": _TOLD, "models": _OF_MODELS}.get(page, ())
    parts += [f"## {cls.__name__}\n\n{_class(cls.__name__, cls)}" for cls in told]
    return "\n\n".join(parts)


def prelude() -> str:
    """What the examples of all pages begin with."""
    return examples()[""]


def _title(target: str) -> str:
    """The heading that a link leads to."""
    page, _, anchor = target.partition("#")
    text = (Path(__file__).resolve().parents[1] / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    slugs = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")): h for h in headings[1:]}
    return f"{headings[0]}: {slugs[anchor].replace('`', '')}" if anchor else headings[0]


def _doc(value: Any) -> str | None:
    own = isinstance(value, type | ModuleType) or inspect.isfunction(value)
    return value.__doc__ if own else type(value).__doc__


def _groups() -> Iterator[tuple[str, list[str]]]:
    source = Path(inspect.getfile(cg)).read_text(encoding="utf-8")
    body = source.partition("_HOMES = {\n")[2].partition("\n}")[0]
    title, names = "", list[str]()
    for match in _GROUP.finditer(body):
        if match[1] is None:
            names.append(match[2])
            continue
        if names:
            yield title, names
        title, names = match[1], []
    yield title, names


def _describe(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return _module(name, value)
    if isinstance(value, ActorFactory):
        on = _code("Cls.on", functools.partial(value.place, object))
        made, placed = type(value).__doc__, value.place.__doc__
        return f"{to_markdown(made, skip=('Args',))}\n\n{on}\n\n{to_markdown(placed)}"
    if isinstance(value, type):
        return _class(name, value)
    if inspect.isfunction(value):
        return f"{_code(f'cg.{name}', value)}\n\n{to_markdown(value.__doc__)}"
    return to_markdown(type(value).__doc__, skip=("Args",))


def _module(name: str, module: ModuleType) -> str:
    parts = [to_markdown(module.__doc__)]
    for member in module.__all__:
        value = getattr(module, member)
        if inspect.isfunction(value):
            code = _code(f"cg.{name}.{member}", value)
            parts.append(f"{code}\n\n{to_markdown(value.__doc__)}")
        elif isinstance(value, type):
            parts.append(f"### cg.{name}.{member}\n\n{_class(f'{name}.{member}', value)}")
    return "\n\n".join(parts)


def _class(name: str, cls: type) -> str:
    parts = [to_markdown(cls.__doc__)]
    if issubclass(cls, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        parts.insert(0, f"An exception, of {bases}.")
    inherited = vars(Programs) if issubclass(cls, Programs) else {}
    for member, value in {**vars(cls), **inherited}.items():
        if member.startswith("_") and member != "__call__":
            continue
        shown = _instance(name, cls) + ("" if member == "__call__" else f".{member}")
        if isinstance(value, property):
            if value.fget is not None and value.fget.__doc__:
                parts.append(f"**`{shown}`**: {to_markdown(value.fget.__doc__)}")
            continue
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(function) and function.__doc__:
            parts.append(f"{_code(shown, function)}\n\n{to_markdown(function.__doc__)}")
    return "\n\n".join(parts)


_PREFIXES: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _instance(name: str, cls: type) -> str:
    """The name by which signatures call an instance of a class."""
    if issubclass(cls, BaseException):
        return "error"
    return name.rpartition(".")[2].lower().removeprefix("actor")


def _code(name: str, function: Callable[..., Any]) -> str:
    """The signature as a code block, on as many lines as it needs."""
    parameters, result = _signature(function)
    text = f"{name}({', '.join(parameters)}){result}"
    if len(text) > 96:
        text = f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){result}"
    return f"```python\n{text}\n```"


def _signature(function: Callable[..., Any]) -> tuple[list[str], str]:
    signature = inspect.signature(function)
    parameters: list[str] = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        prefix = _PREFIXES.get(parameter.kind, "")
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        text = prefix + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parameters.append(text)
    result = signature.return_annotation
    return parameters, "" if result is signature.empty else f" -> {result}"
