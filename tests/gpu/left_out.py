"""Which of the documented commands are not run on GPUs, and why.

The first rule that fits a command gives the reason. A command that no rule fits is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .documented import Shown


@dataclass(frozen=True)
class Rule:
    """Leave a command out.

    Attributes:
        reason: in words, which the table of commands shows.
        text: a pattern that its text begins with.
        inside: a pattern anywhere in its text.
        file: the beginning of the path of the page or example that shows it.
    """

    reason: str
    text: str = ""
    inside: str = ""
    file: str = ""

    def fits(self, shown: Shown) -> bool:
        return (
            re.match(self.text, shown.text) is not None
            and re.search(self.inside, shown.text) is not None
            and shown.file.startswith(self.file)
        )


RULES = (
    Rule("needs NPUs: docs/backends/hccl.md says what has been run", file="docs/backends/hccl.md"),
    Rule("make brings .venv up to date, from a network", text="make "),
    Rule("installs packages, from a network", text="pip install"),
    Rule("sets up the shell that is typed in", text=r"\. "),
    Rule("Jupyter is not installed with cg", text="jupyter"),
    Rule("works on files, on hosts alone: tests/text runs it", text="cg-(opt|sim) "),
    Rule("shows or writes a file: tests/test_docs.py runs it", text="(cat|grep|sed|ls|echo) ?"),
    Rule("waits for ranks of Slurm", inside="SLURM"),
    Rule("needs a cluster: tests/examples/test_kubernetes.py", text="(docker|kubectl) "),
    Rule("needs several machines: tests/mpi/test_hosts.py", inside="-(hosts|hostfile) "),
    Rule("starts again what has failed: tests/launch/test_restarts.py", inside="--restarts "),
    Rule("asks a server, as tests/gpu/test_serving.py does", text="((until )?curl|lm_eval) "),
    Rule("shows an error: tests/test_docs.py runs it", text="CG_RANKS=two "),
    Rule(
        "needs an adapter of the model: tests/examples/test_serve_lora.py has some",
        text="python -m examples.serve ",
        inside="--lora ",
    ),
    Rule(
        "needs a model that pools: tests/examples/test_serve_pooling.py has some",
        text="python -m examples.serve ",
        inside="--model (EMBEDDER|RERANKER)",
    ),
    Rule("a benchmark, which takes minutes", inside=r"\bbenchmarks[./]"),
    Rule("the package with its weights is not a part of tests", inside="smollm2"),
    Rule("a transport of hosts: tests/mpi/test_mailbox.py runs it", inside="mailbox_job"),
    Rule(
        "a part of python -m examples.serve, which starts it",
        inside=r"examples\.serve\.(ranks|structure\.check)",
    ),
)
"""Each rule with its reason; the first that fits counts."""


def reason(shown: Shown) -> str | None:
    """Why a command is not run; None if it is."""
    return next((rule.reason for rule in RULES if rule.fits(shown)), None)
