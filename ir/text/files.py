"""Read the text files that users write: schedules, costs, IR."""

from __future__ import annotations

from pathlib import Path


class NotTextError(ValueError):
    """A file is not a text file."""


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that some editors write.

    Raises:
        NotTextError: the file is not text in UTF-8; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotTextError(f"{path} is not a text file: {error}") from error
