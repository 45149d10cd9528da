"""Serve a model over HTTP: `python -m examples.serve --model DIR -n 2`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from . import features as switches
from .front.adjusting import Rules, rules_of
from .front.admission import POOLING_BODY, Bounds
from .front.connections import listen
from .front.names import Names
from .front.server import Front
from .front.text import load
from .front.tools.dialects import PARSERS, REASONING, dialect_of
from .models import resolve
from .options import NGRAM, adapters, add_arguments, draft_tokens, refuse_for_pooling, words
from .pooling.recipe import GENERATE, Recipe, recipe_of, task_of
from .transports import loop_factory

ROOT = Path(__file__).resolve().parents[2]
BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns its exit code."""
    options = _parse(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    log = logging.getLogger("serve")
    try:
        features = switches.parse(options.features)
        new_loop = loop_factory(features)
        listener = listen(options.host, options.port)
        model, note = resolve(options.model)
        draft_tokens(options)
        names = Names(tuple(options.name or [Path(model).name]), tuple(adapters(options)))
        if options.draft not in (None, NGRAM):
            options.draft, _ = resolve(options.draft)
        recipe = settle_task(options, Path(model))
        text = load(model, chats=recipe is None)
        rules = Rules(options.choices, options.stops)
        if options.generation_config == "model" and recipe is None:
            rules = rules_of(Path(model), rules)
        folder = tempfile.TemporaryDirectory(prefix="cg-serve-")  # of mode 0700
    except (OSError, OverflowError, ValueError) as error:
        print(f"examples.serve: {error}", file=sys.stderr)
        return BAD_USAGE
    if rules.defaults or rules.max_tokens:
        log.info("what requests leave out is as generation_config.json says: %s", rules.shown())
    host, port = listener.getsockname()[:2]
    shown = "', '".join(names.all)
    log.info("serving %s as '%s' at http://%s:%d/", note, shown, host, port)
    with folder, listener:
        body = Bounds.body if recipe is None else POOLING_BODY
        bounds = Bounds(options.requests, options.tokens, body, drain=options.drain)
        command = in_process(options, model) if features.inproc else job(options, model, features)

        async def serve() -> int:
            path = Path(folder.name)
            dialect = dialect_of(text.template, options.tool_parser, options.reasoning_parser)
            key, origins = options.api_key, options.allow_origin
            front = Front(
                *(names, text, command, path, bounds, features, key, rules, dialect, origins),
                recipe=recipe,
            )
            return await front.serve(listener)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(serve())


def settle_task(parsed: argparse.Namespace, folder: Path) -> Recipe | None:
    """Write what the model is served for into the options; the recipe of a model that pools.

    Raises:
        FileNotFoundError, ValueError: as `recipe_of` and `refuse_for_pooling`.
    """
    parsed.task = task_of(folder, parsed.task)
    if parsed.task == GENERATE:
        if parsed.pooling is not None or parsed.dimensions is not None:
            raise ValueError(
                "--pooling and --dimensions are for models that pool: give --task embed"
            )
        return None
    refuse_for_pooling(parsed)
    return recipe_of(folder, parsed.task, parsed.pooling, parsed.dimensions)


def job(parsed: argparse.Namespace, model: str, features: switches.Features) -> list[str]:
    """The command of the engine's job; the address of the socket is appended."""
    line = [sys.executable, "-m", "cg.launch", "-n", str(parsed.ranks)]
    line += [] if features.thr_cap else ["--no-thread-cap"]
    line += [] if features.affinity else ["--no-affinity"]
    line += ["-m", "examples.serve.ranks"]
    return [*line, *words(argparse.Namespace(**vars(parsed) | {"model": model}))]


def in_process(parsed: argparse.Namespace, model: str) -> Callable[[Path], Awaitable[None]]:
    """The engine in this process, for an ablation; one process plays all ranks."""
    from .ranks import serve_here  # which imports torch, unlike the front

    parsed.model = model
    return lambda path: serve_here(parsed, path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=1, help="MPI ranks: --tp x --ep x --cp for each stage")
    add("--host", default="127.0.0.1", help="where to listen; the default is this machine alone")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--api-key", help="what clients have to send as a bearer token")
    add(
        *("--name", "--served-model-name"),
        nargs="+",
        action="extend",
        help="the model's names for clients; by default that of its folder",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of pages that browsers let ask, such as https://example.org; * for all",
    )
    add("--tool-parser", choices=sorted(PARSERS), help="calls of tools; by default the template's")
    add("--reasoning-parser", choices=REASONING, help="thoughts; by default the template's")
    add("--requests", type=int, default=Bounds.requests, help="admitted at once; more get 429")
    add("--tokens", type=int, default=Bounds.tokens, help="of all admitted requests together")
    add("--drain", type=float, default=Bounds.drain, help="seconds for requests after SIGTERM")
    add("--choices", type=int, default=Rules.choices, help="prompts times n of a request, at most")
    add("--stops", type=int, default=Rules.stops, help="stop strings of a request, at most")
    add(
        "--generation-config",
        choices=("model", "none"),
        default="model",
        help="whether generation_config.json says what requests leave out",
    )
    add_arguments(parser)
    parser.set_defaults(model=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
