"""The passes and the default pipeline, read off the registry and `passes/manager/pipelines.py`."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from cg.ir.phases import Phase
from cg.passes.base import Pass
from cg.passes.manager import pipelines, registry

from .docstrings import to_markdown
from .tables import table


def pipeline() -> str:
    """The default pipeline in order, with the reason why each pass stands where it does."""
    reasons = _reasons()
    passes = pipelines.default_pipeline()
    if len(reasons) != len(passes):
        raise ValueError(f"{len(passes)} passes in the pipeline, {len(reasons)} reasons for them")
    return table(
        ("", "pass", "phase", "why here"),
        [
            (str(number), f"[`{p.name}`](#{p.name})", _phases(type(p)), reason)
            for number, (p, reason) in enumerate(zip(passes, reasons, strict=True), 1)
        ],
    )


def _reasons() -> list[str]:
    """The comment above each pass of the pipeline; one that has none shares that of the last."""
    source = inspect.getsource(pipelines.default_pipeline)
    body = source.partition("= [\n")[2].partition("\n    ]")[0]
    reasons: list[str] = []
    comment: list[str] = []
    for line in map(str.strip, body.splitlines()):
        if line.startswith("#"):
            comment.append(line.removeprefix("# "))
        elif re.match(r"[A-Z]\w+\(", line):
            reasons.append(" ".join(comment) if comment else reasons[-1])
            comment = []
    return reasons


def reference() -> str:
    """Every pass: those of the pipeline in its order, then the others."""
    ordered = dict.fromkeys(p.name for p in pipelines.default_pipeline())
    ordered |= dict.fromkeys(registry.names())
    return "\n\n".join(_pass(registry.lookup(name)) for name in ordered)


def _pass(cls: type[Pass]) -> str:
    kind = "may be switched off" if cls.optional else "always runs"
    options = "none"
    if fields(cls):
        options = f"`{cls.name}{cls.describe_options()}`"
    facts = f"Phase: {_phases(cls)}. Options: {options}. It {kind}."
    doc = registry.documentation(cls.name)
    return f"## {cls.name}\n\n{facts}\n\n{to_markdown(doc)}"


def _phases(cls: type[Pass]) -> str:
    every = len(cls.requires) == len(Phase)
    before = "any" if every else " or ".join(map(str, cls.requires))
    return before if cls.ensures is None else f"{before} to {cls.ensures}"
