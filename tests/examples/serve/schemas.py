"""Random JSON schemas, of the kinds that public suites have: every value of them is finite."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
FORMATS = ("date", "date-time", "uuid", "ipv4")
PATTERNS = ("^[a-z]{2,5}$", "^(foo|ba[rz]){1,3}x{0,2}$", "^[A-Z][0-9]{3}-?$")
NAMES = ("id", "name", "größe", "a b", 'quo"te', "$ref-like", "x" * 20, "0")


class Drawer:
    """Draws schemas.

    Args:
        seed: of the choices.
    """

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.kinds: list[Callable[[int], Schema]] = [
            *(self.string, self.integer, self.number, self.constant, self.enum, self.plain),
            *(self.pattern, self.formatted, self.either, self.types),
            *(self.object, self.object, self.array, self.tuple, self.every),
        ]

    def schema(self) -> Schema:
        """A schema; some name parts of themselves."""
        if self.source.random() < 0.15:
            return self.named()
        return self.draw(3)

    def draw(self, depth: int) -> Schema:
        """One of any kind; `depth` more levels may nest."""
        kinds = self.kinds if depth else self.kinds[:8]
        return self.source.choice(kinds)(depth)

    def string(self, depth: int) -> Schema:
        least = self.source.randint(0, 4)
        return {
            "type": "string",
            "minLength": least,
            "maxLength": least + self.source.randint(0, 6),
        }

    def integer(self, depth: int) -> Schema:
        low = self.source.randint(-1000, 1000)
        high = low + self.source.randint(1, 500)
        names = self.source.choice([("minimum", "maximum"), ("exclusiveMinimum", "maximum")])
        return {"type": "integer", names[0]: low, names[1]: high}

    def number(self, depth: int) -> Schema:
        return {"type": "number", "minimum": 0, "maximum": self.source.randint(1, 50)}

    def constant(self, depth: int) -> Schema:
        return {"const": self.source.choice([1, "one", None, True, [1, "x"], {"a": 0.5}])}

    def enum(self, depth: int) -> Schema:
        values = ["a", 'b"', "ü", 3, -0.5, None, False, ["deep", {}], "x" * 30]
        return {"enum": self.source.sample(values, self.source.randint(1, 5))}

    def plain(self, depth: int) -> Schema:
        return {"type": self.source.choice(["boolean", "null"])}

    def pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self.source.choice(PATTERNS)}

    def formatted(self, depth: int) -> Schema:
        return {"type": "string", "format": self.source.choice(FORMATS)}

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.draw(depth - 1) for _ in range(self.source.randint(1, 3))]}

    def types(self, depth: int) -> Schema:
        return {"type": ["null", "integer"], "minimum": 0, "maximum": 20}

    def every(self, depth: int) -> Schema:
        low = self.source.randint(0, 50)
        parts = [{"type": "integer", "minimum": low}, {"maximum": low + 20}]
        return {"allOf": parts}

    def array(self, depth: int) -> Schema:
        least = self.source.randint(0, 2)
        most = least + self.source.randint(0, 2)
        return {"type": "array", "items": self.draw(depth - 1), "minItems": least, "maxItems": most}

    def tuple(self, depth: int) -> Schema:
        parts = [self.draw(depth - 1) for _ in range(self.source.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def object(self, depth: int) -> Schema:
        names = self.source.sample(NAMES, self.source.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: self.draw(depth - 1) for name in names},
            "required": [name for name in names if self.source.random() < 0.6],
            "additionalProperties": False,
        }

    def named(self) -> Schema:
        """A schema with definitions: one that is used twice, and a list that may end or go on."""
        part = {"$ref": "#/$defs/part"}
        chain = {
            "type": "object",
            "properties": {"next": {"enum": [None, 0]}, "part": part},
            "required": ["next"],
            "additionalProperties": False,
        }
        if self.source.random() < 0.5:
            chain["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]}
        body = {
            "type": "object",
            "properties": {"one": part, "two": part, "chain": {"$ref": "#/$defs/chain"}},
            "required": ["one", "chain"],
            "additionalProperties": False,
        }
        return {**body, "$defs": {"part": self.draw(1), "chain": chain}}
