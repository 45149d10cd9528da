"""A program of two files that tests edit: its lines, its helper, its surroundings."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cg  # noqa: F401
from cg.backends.virtual.world import VirtualWorld
from cg.ir.text.printer import format_module
from cg.launch.api import step_function
from cg.launch.world.world import use_world
from cg.tracer.graph.codegen.bodies import GraphBody
from cg.tracer.method.alike import Traces
from cg.tracer.record.trace import Trace

PROGRAM = """\
import os
import torch
import torch.nn.functional as F
import cg  # noqa: F401
import edited_helper
from edited_helper import scaled
{comment}
FACTOR = {global_}
TABLE = {{"a": [1.0, {table}]}}


def closing(value):
    def closed(x):
        return x * value
    return closed


class Layer(torch.nn.Module):
    slope = {attribute}

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, {width}, bias={bias})
        self.back = torch.nn.Linear({width}, 4)
        self.closed = closing({closure})

    def forward(self, x, power={default}):
        {comment}
        x = self.back({activation}(self.linear(x)))
        {order}
        x = self.closed(scaled(x)) + edited_helper.{called}(x) * FACTOR
        if os.environ.get("EDITED_VARIABLE"):
            x = x + float(os.environ["EDITED_VARIABLE"])
        {mark}
        with torch.{mode}():
            y = x * TABLE["a"][1]
        x = x + y
        return F.{function}(x, self.slope) ** power


@cg.actor
class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range({layers}))
        {frozen}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {result}


stages = [Stage.on(0)() for _ in range(2)]


@cg.trace
def step(x):
    losses = []
    for part in cg.microbatches(x, {microbatches}):
        for stage in stages:
            part = stage.forward(part)
        losses.append(part.square().mean())
    loss = cg.mean(losses)
    cg.backward(loss)
    return loss
"""

HELPER = """\
{comment}
SCALE = {scale}


def scaled(x, by={helper_default}):
    return x * SCALE + by


def shifted(x):
    return x + {shift}


def turned(x):
    return -x
"""

CHOICES: dict[str, tuple[str, ...]] = {
    "global_": ("2.0", "3.0", "2"),
    "table": ("0.5", "0.25"),
    "attribute": ("0.1", "0.2"),
    "width": ("4", "6"),
    "bias": ("True", "False"),
    "closure": ("1.5", "-1.5"),
    "default": ("2", "2.0", "3"),
    "activation": ("torch.tanh", "torch.sigmoid"),
    "order": ("pass", "x = x.transpose(0, 1).transpose(0, 1)", "x = x + x"),
    "called": ("shifted", "turned"),
    "mark": ("pass", "x = cg.keep(x)", "x = cg.recompute(x)"),
    "mode": ("no_grad", "enable_grad"),
    "function": ("leaky_relu", "elu"),
    "layers": ("2", "3"),
    "frozen": ("pass", "self.layers[0].linear.weight.requires_grad_(False)"),
    "result": ("x", "x.clone()", "x.detach() + x"),
    "microbatches": ("2", "4"),
    "scale": ("1.0", "0.5", "-0.0"),
    "helper_default": ("0.0", "0.125"),
    "shift": ("1", "1.0"),
}
"""What an edit may put into the program; the first is what it is at first."""

COMMENTS = ("", "# a comment", "# one\n        # two", '"a text that nobody reads"')


def _replaced_helper() -> Callable[..., Any]:
    return lambda x, by=0.0: x * 7 + by


def _replaced_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, self.weight * 2, self.bias)


SURROUNDINGS = ("nothing", "patched helper", "patched forward", "variable", "other variable")


@dataclass(frozen=True)
class Version:
    """A version of the program, and what is around it.

    Attributes:
        chosen: by place, which of `CHOICES`.
        comment: which of `COMMENTS`.
        around: which of `SURROUNDINGS`.
        rows: of the batch.
        dtype: the default dtype.
    """

    chosen: dict[str, int] = field(default_factory=dict)
    comment: int = 0
    around: str = "nothing"
    rows: int = 8
    dtype: torch.dtype = torch.float32

    def files(self) -> dict[str, str]:
        """The texts of the files."""
        texts = {name: options[self.chosen.get(name, 0)] for name, options in CHOICES.items()}
        texts["comment"] = COMMENTS[self.comment]
        helper = texts | {"comment": COMMENTS[self.comment].replace("\n        ", "\n")}
        program = PROGRAM.replace("\n{comment}\nF", "\n{comment_at_top}\nF")
        texts["comment_at_top"] = helper["comment"]
        return {"edited_helper": HELPER.format(**helper), "edited_program": program.format(**texts)}

    def commented(self, comment: int) -> Version:
        return replace(self, comment=comment)


class MemoryStore:
    """Keeps texts of traces in memory, and counts those that are kept and those that serve."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.reasons: list[str] = []
        self.mended: list[str] = []
        self.pending: list[tuple[str, Callable[[], str]]] = []
        self.kept = self.taken = 0

    @property
    def is_empty(self) -> bool:
        return not self.texts

    def read(self, key: str) -> Iterator[str]:
        yield from reversed(self.texts.get(key, [])[-3:])

    def keep(self, key: str, make_text: Callable[[], str]) -> None:
        self.kept += 1
        self.pending.append((key, make_text))

    def flush(self) -> None:
        """Write the texts, as a process does behind its first step."""
        while self.pending:
            key, make_text = self.pending.pop(0)
            self.texts.setdefault(key, []).append(make_text())

    def take(self, call: str) -> None:
        self.taken += 1

    def mend(self, call: str, reason: str) -> None:
        self.mended.append(reason)

    def leave_out(self, call: str, reason: str) -> None:
        self.reasons.append(reason)


@contextmanager
def loaded(version: Version, folder: Path) -> Iterator[ModuleType]:
    """The program of a version, run anew, as at the start of a process."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        before = torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(version.dtype)
        modules: dict[str, ModuleType] = {}
        for name, text in version.files().items():
            file = folder / f"{name}.py"
            file.write_text(text)
            module = modules[name] = ModuleType(name)
            module.__file__ = str(file)
            patch.setitem(sys.modules, name, module)
            exec(compile(text, str(file), "exec"), vars(module))
        if version.around == "patched helper":
            patch.setattr(modules["edited_program"], "scaled", _replaced_helper())
        elif version.around == "patched forward":
            patch.setattr(torch.nn.Linear, "forward", _replaced_forward)
        elif version.around.endswith("variable"):
            text = "0.5" if version.around == "variable" else "1.5"
            patch.setenv("EDITED_VARIABLE", text)
        yield modules["edited_program"]


def traced(version: Version, folder: Path, store: MemoryStore | None) -> str:
    """All that a trace of a version holds, as text; with the traces that a store has."""
    with use_world(VirtualWorld(1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_function, "new_traces", lambda: Traces(store))
        with loaded(version, folder) as program:
            text = described(program.step.lower(_batch(version)).trace)
            if store is not None:
                store.flush()
            return text


def trained(version: Version, folder: Path, store: MemoryStore) -> list[str]:
    """The losses and the gradients of two steps, with the traces that a store has."""
    with use_world(VirtualWorld(1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_function, "new_traces", lambda: Traces(store))
        with loaded(version, folder) as program:
            losses = [program.step(_batch(version)).item().hex() for _ in range(2)]
            gradients = [
                parameter.grad.sum().item().hex()
                for stage in program.stages
                for parameter in stage.local.parameters()
            ]
            store.flush()
            return losses + gradients


def _batch(version: Version) -> torch.Tensor:
    return torch.linspace(-1, 1, version.rows * 4).reshape(version.rows, 4)


def described(trace: Trace) -> str:
    """A trace as text: its module, and the graphs of its bodies with their types and lines."""
    lines = [format_module(trace.module, locations=True)]
    for name, body in trace.bodies.items():
        assert isinstance(body, GraphBody), name
        lines.append(name)
        graph, places = body.graph_and_lines()
        for node in graph.nodes:
            value = node.meta.get("val")
            kind = "" if not isinstance(value, torch.Tensor) else f"{value.dtype}{value.shape}"
            mark = node.meta.get("cg.saving")
            place = places.get(node)
            lines.append(f"{node.format_node()} {kind} {node.kwargs} {mark} {place}")
    lines += [str(trace.outputs.tree), str(trace.inputs.tree), str(len(trace.guards))]
    return _numbered_anew("\n".join(lines))


def _numbered_anew(text: str) -> str:
    """The text with actors numbered from 0: a process goes on to count them."""
    names = sorted(set(re.findall(r"\bstage\d+", text)), key=lambda name: int(name[5:]))
    new = {name: f"stage{number}" for number, name in enumerate(names)}
    return re.sub(r"\bstage\d+", lambda match: new[match[0]], text)
