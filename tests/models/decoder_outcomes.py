"""Record what comes of the decoders of transformers: `python -m tests.models.decoder_outcomes`.

Without names of types it tries all; with `--missing` those of which nothing is recorded. What it
finds goes to `decoders.json` after each type, of which `docs/reference/decoders.md` is made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from .decoder_runs import PLAN, SAVED, SERVED, SHAPES, outcome_of
from .decoders import types

FILE = Path(__file__).with_name("decoders.json")
COLUMNS = (PLAN, *SHAPES, SAVED, SERVED)


def record() -> dict[str, Any]:
    """What has been recorded: versions, and outcomes by type and shape."""
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return known


def write(known: dict[str, Any]) -> None:
    known["transformers"], known["types"] = transformers.__version__, len(types())
    known["torch"] = torch.__version__.partition("+")[0]
    known["decoders"] = dict(sorted(known["decoders"].items()))
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="only what is not recorded yet")
    parser.add_argument("--column", choices=COLUMNS, help="only this one")
    parser.add_argument("types", nargs="*", help="types of model; all by default")
    options = parser.parse_args()
    known = record()
    for kind in options.types or types():
        row = known["decoders"].setdefault(kind, {})
        for column in (options.column,) if options.column else COLUMNS:
            if options.missing and column in row:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row[column] = outcome_of(kind, column, Path(folder)).as_record()
            print(kind, column, *row[column], flush=True)
        write(known)


if __name__ == "__main__":
    main()
