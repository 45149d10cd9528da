"""The text form of a plan in a file: scheduled programs, and the traced module that they carry out.

    // cg plan 2
    // facts {"fuse": null}
    // devices {}
    // digest 9f86d0…
    module @train phase=scheduled world=2 {
      …
    }
    // traced
    // module @train phase=traced world=2 {
    //   …
    // }
    // parts
    // 74 5feceb…
    // …
    // index 000000000340

It is a module with comments, so whatever reads modules reads it. Its end lists the parts of the
file: the declarations, the program of each rank, and the trace, with the bytes and the digest of
each. The digest in the head is of that list, and so of all parts: it stands for the proofs of the
programs, and whoever changes these has to prove them again. With the list, a rank reads and checks
its own program alone (`stored_plan.py`). Nothing in the file is executed by reading it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..alike.alike_programs import programs_by_rank
from ..ops.module import Module
from ..phases import Phase
from .parser import parse_module
from .printer import format_declarations, format_programs

HEAD = "// cg plan "
VERSION = 2
TRACED = "}\n// traced\n"
"""What stands between the programs and the trace."""
PARTS = "// parts\n"
INDEX_DIGITS = 12
_HEADER = re.compile(
    r"// cg plan (?P<version>[0-9]{1,9})\n// facts (?P<facts>\{[^\n]*\})\n"
    r"// devices (?P<devices>\{[^\n]*\})\n"
    r"// digest (?P<digest>[0-9a-f]{64})\n"
)


class PlanFileError(ValueError):
    """A file holds no plan, or none for this program; the message says what to do."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class PlanHead:
    """The first lines of a plan's file.

    Attributes:
        facts, devices: as `PlanFile` has them.
        digest: of the plan, as the file claims it.
        length: of the lines, in characters, which are bytes.
    """

    facts: Mapping[str, Any]
    devices: Mapping[str, str]
    digest: str
    length: int

    @staticmethod
    def of(text: str, file: str) -> PlanHead:
        """Read the head of a text.

        Raises:
            PlanFileError: it begins no plan, or one of another version.
        """
        match = _HEADER.match(text)
        if match is None:
            raise not_a_plan(file)
        if int(match["version"]) != VERSION:
            raise PlanFileError(
                f"{file} is a plan of version {match['version']}, and this cg reads version "
                f"{VERSION}: save it again"
            )
        try:
            facts, devices = json.loads(match["facts"]), json.loads(match["devices"])
        except (ValueError, RecursionError) as error:
            raise PlanFileError(f"{file} is damaged: {error}; save it again") from error
        return PlanHead(facts, devices, match["digest"], match.end())


@dataclass(frozen=True)
class PlanFile:
    """A plan as a file holds it.

    Attributes:
        module: the scheduled programs of all ranks.
        traced: the text of the traced module.
        facts: the options that a trace for them depends on, for JSON.
        devices: the fabrics between devices that they are for; empty for ranks without devices.
    """

    module: Module
    traced: str
    facts: Mapping[str, Any]
    devices: Mapping[str, str]

    def __str__(self) -> str:
        return b"".join(self.encoded()).decode()

    def encoded(self) -> Iterator[bytes]:
        """The bytes of the file in stretches, in order, with the digests of what is written."""
        parts = [text.encode() for text in self._parts()]
        index = "".join(f"// {len(part)} {digest_of(part)}\n" for part in parts)
        digest = plan_digest(self.facts, self.devices, index)
        facts, devices = _json(self.facts), _json(self.devices)
        head = f"{HEAD}{VERSION}\n// facts {facts}\n// devices {devices}\n// digest {digest}\n"
        yield head.encode()
        yield from parts
        yield f"{PARTS}{index}// index {len(index):0{INDEX_DIGITS}}\n".encode()

    def _parts(self) -> Iterator[str]:
        yield f"{format_declarations(self.module, locations=True)}\n"
        yield from format_programs(programs_by_rank(self.module), locations=True)
        yield TRACED + "".join(f"// {line}\n" for line in self.traced.splitlines())

    @staticmethod
    def of(text: str, file: str) -> PlanFile:
        """Parse a file, whether or not it was changed since its programs were proven.

        Args:
            text: of the file.
            file: names it in messages.

        Raises:
            PlanFileError: it is no plan, or of another version, or a part is missing.
            IRError: its programs have an error.
        """
        head = PlanHead.of(text, file)
        module_text, traced_mark, comments = text.partition(f"\n{TRACED}")
        comments, parts_mark, _ = comments.partition(f"\n{PARTS}")
        if not traced_mark or not parts_mark:
            raise not_a_plan(file)
        # With the lines of the head, so that errors name those of the file.
        module = parse_module(f"{module_text}\n}}\n", file)
        check_scheduled(module, file)
        return PlanFile(module, trace_of(f"{comments}\n", file), head.facts, head.devices)


def trace_of(comments: str, file: str) -> str:
    """The trace that stands in lines of comments.

    Raises:
        PlanFileError: a line is no comment.
    """
    lines = comments.splitlines(keepends=True)
    if not lines or not all(line.startswith("// ") for line in lines):
        raise not_a_plan(file)
    return "".join(line.removeprefix("// ") for line in lines)


def check_scheduled(module: Module, file: str) -> None:
    """Return if the module of a plan is scheduled.

    Raises:
        PlanFileError: it is not.
    """
    if module.phase is not Phase.SCHEDULED:
        raise PlanFileError(f"{file} has programs that are not scheduled: save it again")


def digest_of(part: bytes) -> str:
    """The digest of a part of a plan's file."""
    return hashlib.sha256(part).hexdigest()


def plan_digest(facts: Mapping[str, Any], devices: Mapping[str, str], index: str) -> str:
    """The digest of a plan: of its facts, and of the digests of its parts.

    Args:
        facts, devices: as `PlanFile` has them.
        index: the lines of the list of parts.
    """
    return digest_of("\0".join((str(VERSION), _json(facts), _json(devices), index)).encode())


def not_a_plan(file: str) -> PlanFileError:
    """The error for a file that is none of `compiled.save`."""
    return PlanFileError(f"{file} is no plan, or a part of it is missing: save it again")


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(dict(content), sort_keys=True)
