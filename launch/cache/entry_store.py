"""A folder of texts by key, which several processes and jobs read and write at once.

A file appears when it is complete, and has a digest of all that it holds, so one that is torn or
changed counts as absent. The oldest files go when the folder is full; each use makes a file young.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VERSION = 1
"""Of the format of files. Files of another one count as absent."""

LIMIT = 1 << 30
"""The most bytes of a folder's files."""

_HEAD = f"cg cache {VERSION} "
_ENDING = ".entry"
_PARTIAL = ".partial"
_ABANDONED = 3600.0
"""Seconds after which a file that is not complete belongs to a process that has ended."""


@dataclass(frozen=True)
class EntryStore:
    """Texts in the files of a folder.

    Attributes:
        folder: it is made when the first text is written.
        limit: the most bytes of its files.
    """

    folder: Path
    limit: int = LIMIT

    def read(self, kind: str, key: str, most: int) -> Iterator[str]:
        """The texts that were written under a key, the youngest first.

        A file that cannot be read, or is not as it was written, is left out and removed.

        Args:
            kind: what the texts are: the name of a folder of their own.
            key: all that they depend on.
            most: how many to read at most.
        """
        for file in self._files(kind, key)[:most]:
            text = self._content(file)
            if text is None:
                with suppress(OSError):
                    file.unlink()
                continue
            with suppress(OSError):
                os.utime(file)
            yield text

    def is_empty(self, kind: str) -> bool:
        """True if no text of a kind was ever written."""
        return not os.path.exists(self.folder / kind)

    def write(self, kind: str, key: str, text: str, most: int) -> None:
        """Write a text, unless it is there.

        Args:
            kind, key: as in `read`.
            text: the text.
            most: how many texts to keep under this key; older ones go.

        Raises:
            OSError: it cannot be written.
        """
        content = text.encode()
        digest = hashlib.sha256(content).hexdigest()
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{_stem(key)}-{digest[:16]}{_ENDING}"
        partial = folder / f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}{_PARTIAL}"
        try:
            partial.write_bytes(f"{_HEAD}{digest}\n".encode() + content)
            partial.replace(file)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        for old in self._files(kind, key)[most:]:
            with suppress(OSError):
                old.unlink()

    def make_room(self) -> None:
        """Remove the oldest files until the rest is within the limit, and what processes left."""
        complete: list[tuple[float, int, Path]] = []
        now = time.time()
        for file in self.folder.glob("*/*"):
            with suppress(OSError):
                status = file.stat()
                if file.name.endswith(_ENDING):
                    complete.append((status.st_mtime, status.st_size, file))
                elif file.name.endswith(_PARTIAL) and now - status.st_mtime > _ABANDONED:
                    file.unlink()
        size = sum(entry[1] for entry in complete)
        for _, file_size, file in sorted(complete):
            if size <= self.limit:
                return
            with suppress(OSError):
                file.unlink()
            size -= file_size

    def _files(self, kind: str, key: str) -> Sequence[Path]:
        """The files of a key, the youngest first."""
        dated: list[tuple[float, str, Path]] = []
        stem = f"{_stem(key)}-"
        with suppress(OSError), os.scandir(self.folder / kind) as entries:
            for entry in entries:
                if entry.name.startswith(stem) and entry.name.endswith(_ENDING):
                    with suppress(OSError):
                        dated.append((-entry.stat().st_mtime, entry.name, Path(entry.path)))
        return [file for _, _, file in sorted(dated)]

    def _content(self, file: Path) -> str | None:
        """The text of a file; None if it is not as it was written."""
        try:
            head, newline, content = file.read_bytes().partition(b"\n")
            digest = hashlib.sha256(content).hexdigest()
            if not newline or head != f"{_HEAD}{digest}".encode():
                return None
            return content.decode()
        except (OSError, UnicodeDecodeError):
            return None


def _stem(key: str) -> str:
    """The beginning of the names of a key's files."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]
