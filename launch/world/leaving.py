"""Says which method ends the program of a rank: its exit code alone tells nobody."""

from __future__ import annotations

from . import failure


def say_departure(error: BaseException) -> None:
    """Name the method that has raised `error`, which is for the whole program, and where.

    Only if it is a `SystemExit`, of which the interpreter says nothing: an exception that nobody
    catches is for `failure`.
    """
    if isinstance(error, SystemExit):
        failure.say(
            f"SystemExit({', '.join(map(repr, error.args))}){failure.whereabouts(error)}. It ends "
            "the program of this rank, unless that catches it. To tell the caller that its call "
            "has failed, raise an Exception"
        )
