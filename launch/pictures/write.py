"""Write a timeline to a file, in the form that the file's name asks for."""

from __future__ import annotations

from pathlib import Path

from .model import Picture
from .perfetto import write_trace
from .timeline_html import timeline_html
from .timeline_svg import timeline_svg


def write_picture(picture: Picture, path: Path, form: str | None = None) -> None:
    """Write a timeline; the file's folder is made if it does not exist.

    Args:
        picture: the timeline to draw.
        path: ends in `.svg`, `.html` or, for a Perfetto trace, `.json`.
        form: which of these to write, whatever the path ends in.

    Raises:
        ValueError: it ends in something else.
    """
    kind = form or path.suffix.lower()
    if kind not in (".svg", ".html", ".json"):
        raise ValueError(
            f"{path}: a picture is written as .svg, .html or, for Perfetto, .json; name it so"
        )
    if kind == ".json":
        write_trace(picture, path)
        return
    text = timeline_svg(picture) if kind == ".svg" else timeline_html(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
