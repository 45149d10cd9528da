"""The text form of a plan in a file: scheduled programs, and the traced module that they carry out.

    // cg plan 1
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

It is a module with comments, so whatever reads modules reads it. The digest is of all the rest as
it is parsed: it stands for the proofs of the programs, and whoever changes these has to prove them
again. Nothing in it is executed by reading it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ops.module import Module
from ..phases import Phase
from .parser import parse_module
from .printer import format_module

HEAD = "// cg plan "
VERSION = 1
_TRACED = "// traced"
_HEADER = re.compile(
    r"// cg plan (?P<version>\d+)\n// facts (?P<facts>\{[^\n]*\})\n"
    r"// devices (?P<devices>\{[^\n]*\})\n"
    r"// digest (?P<digest>[0-9a-f]{64})\n"
    r"(?P<module>.*?)\n// traced\n(?P<traced>(?:// [^\n]*\n)+)",
    re.S,
)


class PlanFileError(ValueError):
    """A file holds no plan, or none for this program; the message says what to do."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class PlanFile:
    """A plan as a file holds it.

    Attributes:
        module: the scheduled programs of all ranks.
        traced: the text of the traced module.
        facts: the options that a trace for them depends on, for JSON.
        devices: the fabrics between devices that they are for; empty for ranks without devices.
        is_proven: whether the digest was that of what the file holds.
    """

    module: Module
    traced: str
    facts: Mapping[str, Any]
    devices: Mapping[str, str]
    is_proven: bool = True

    def __str__(self) -> str:
        comments = "".join(f"// {line}\n" for line in self.traced.splitlines())
        return (
            f"{HEAD}{VERSION}\n// facts {_json(self.facts)}\n// devices {_json(self.devices)}\n"
            f"// digest {self._digest()}\n"
            f"{format_module(self.module, locations=True)}{_TRACED}\n{comments}"
        )

    def _digest(self) -> str:
        facts = _json(self.facts), _json(self.devices)
        texts = (str(VERSION), *facts, format_module(self.module), self.traced)
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    @staticmethod
    def of(text: str, file: str) -> PlanFile:
        """Parse a file.

        Args:
            text: of the file.
            file: names it in messages.

        Raises:
            PlanFileError: it is no plan, or of another version, or a part is missing.
            IRError: its programs have an error.
        """
        match = _HEADER.fullmatch(text)
        if match is None:
            raise PlanFileError(f"{file} is no plan, or a part of it is missing: save it again")
        if int(match["version"]) != VERSION:
            raise PlanFileError(
                f"{file} is a plan of version {match['version']}, and this cg reads version "
                f"{VERSION}: save it again"
            )
        try:
            facts, devices = json.loads(match["facts"]), json.loads(match["devices"])
        except json.JSONDecodeError as error:
            raise PlanFileError(f"{file} is damaged: {error}; save it again") from error
        # With the lines of the header, so that errors name those of the file.
        module = parse_module(text[: match.end("module")], file)
        if module.phase is not Phase.SCHEDULED:
            raise PlanFileError(f"{file} has programs that are not scheduled: save it again")
        traced = re.sub(r"(?m)^// ", "", match["traced"])
        plan = PlanFile(module, traced, facts, devices)
        return replace(plan, is_proven=plan._digest() == match["digest"])


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(dict(content), sort_keys=True)
