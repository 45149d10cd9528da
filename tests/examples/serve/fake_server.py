"""The front, with the fake engine: `python fake_server.py OPTIONS`; it prints its port."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

from examples.serve import features as switches
from examples.serve.front.adjusting import Rules
from examples.serve.front.admission import Bounds
from examples.serve.front.connections import listen
from examples.serve.front.names import Names
from examples.serve.front.server import Front
from examples.serve.front.structure.checker import Checker
from examples.serve.front.text import Bytes
from examples.serve.front.tools.dialects import Dialect
from examples.serve.pooling.recipe import Recipe
from examples.serve.transports import loop_factory


def main() -> int:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    options = json.loads(sys.argv[1])
    for word in sys.argv[2:]:
        name, _, value = word.partition("=")
        options[name.removeprefix("--")] = value
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    logging.info("serving at http://127.0.0.1:%d/", listener.getsockname()[1])
    rank = str(Path(__file__).with_name("fake_rank.py"))
    features = switches.parse(options.get("features", ""))
    bounds = Bounds(**options.get("bounds", {}))
    with tempfile.TemporaryDirectory(prefix="cg-serve-") as folder:

        async def serve() -> int:
            command = [sys.executable, rank, json.dumps(options)]
            key = options.get("key")
            path, rules = Path(folder), Rules(**options.get("rules", {}))
            dialect = Dialect(*options.get("dialect", ()))
            origins = options.get("origins", ())
            names = Names(tuple(options.get("names", ["fake"])), tuple(options.get("adapters", ())))
            front = Front(
                *(names, Bytes(), command, path, bounds, features, key, rules, dialect, origins),
                recipe=Recipe(**options["recipe"]) if "recipe" in options else None,
            )
            if "compile_seconds" in options:
                front.grammars = Checker(Bytes().stored, options["compile_seconds"])
            return await front.serve(listener)

        with asyncio.Runner(loop_factory=loop_factory(features)) as runner:
            return runner.run(serve())


if __name__ == "__main__":
    sys.exit(main())
