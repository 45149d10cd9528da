"""Find the buckets of parameters, which are gathered together, by patterns of their paths."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ...ir.ops.names import layer_of


def bucket_of(path: str, pattern: str) -> str:
    """The bucket of a parameter: the beginning of its path that a pattern matches, or "".

    Args:
        path: the path from the actor, such as `blocks.3.up.weight`.
        pattern: a pattern of the path of a module or parameter, with `*` and `?` as in file names,
            each within one name. Several patterns have `|` between them; the first that matches
            counts. Empty: a bucket for each layer (`layer_of`).
    """
    if not pattern:
        return layer_of(path)
    names = path.split(".")
    for form in _forms(pattern):
        form_names = form.split(".")
        if len(form_names) <= len(names) and all(map(fnmatchcase, names, form_names)):
            return ".".join(names[: len(form_names)])
    return ""


def unmatched(pattern: str, paths: Iterable[str]) -> list[str]:
    """The alternatives of a pattern that match none of the parameters with these paths."""
    known = list(paths)
    return [form for form in _forms(pattern) if not any(bucket_of(path, form) for path in known)]


def _forms(pattern: str) -> list[str]:
    return [form.strip() for form in pattern.split("|")] if pattern else []
