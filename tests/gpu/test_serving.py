"""The documented commands of the server: what it answers on GPUs is what transformers generates."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ..mpi import jobs
from .cases import Case, cases
from .documented import ROOT, Command
from .playing import SECONDS, VARIABLES, line, skip_if_lacking

pytestmark = pytest.mark.timeout(600)

GPUS = torch.cuda.device_count() or 2
SERVERS = [case for case in cases(GPUS) if case.command.name == "serve"]

FEW = "--port 0 --batch 2 --batches --chunks --blocks 32 --block-size 8 --chunk"
"""Options by which few graphs are compiled; the length of chunks comes last."""

PROMPTS = ((5, 9, 200, 31, 7), tuple(range(40, 63)), (1,))
COUNT = 16


def on_gpus(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.gpu(case.command.ranks), id=case.id)


def on_the_host(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow, id=case.id)


@dataclass(frozen=True)
class Models:
    """Folders of models with the same tokens, each with a text of its own.

    Attributes:
        dense: without experts.
        mixture: with experts.
        draft: a smaller one, which proposes tokens for `dense`.
    """

    dense: Path
    mixture: Path
    draft: Path

    def served_by(self, command: Command) -> Path:
        return self.dense if command.option("--ep") is None else self.mixture

    def words(self, command: Command) -> list[str]:
        """The words of a command, with folders for `DIR` and `SMALL`."""
        folders = {"DIR": str(self.served_by(command)), "SMALL": str(self.draft)}
        return [folders.get(word, word) for word in line(command)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    pytest.importorskip("transformers")
    from benchmarks.one_gpu import folder
    from benchmarks.one_gpu.qwen2 import SMALL

    written = Models(*map(tmp_path_factory.mktemp, ("model", "mixture", "draft")))
    for path, layers in ((written.dense, 4), (written.mixture, 4), (written.draft, 2)):
        folder.write(path, replace(SMALL, layers=layers), 64, torch.float32)
    _write_mixture(written.mixture)
    return written


def _write_mixture(path: Path) -> None:
    """Write a mixture of experts over the model of a folder, with the same tokens."""
    from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM

    dense = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    MixtralForCausalLM(config).save_pretrained(path)


def generated(model: Path, is_float8: bool) -> list[str]:
    """What transformers makes of each prompt on the host, in float32.

    Args:
        is_float8: whether its cache rounds keys and values to float8, as the server's does.
    """
    import transformers

    from ..examples.float8_oracle import Float8Cache

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = whole.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=0,
            past_key_values=Float8Cache() if is_float8 else None,
        )
        texts.append(tokenizer.decode(out[0, len(prompt) :]))
    return texts


@contextmanager
def serving(words: list[str], log: Path, device: str) -> Iterator[str]:
    """The address of a server that is ready; afterwards it has ended by SIGTERM, with code 0."""
    with log.open("w") as file:
        process = subprocess.Popen(
            # The kernels of ranks that share sequences take multiples of 32 tokens.
            [*words, *FEW.split(), "32" if "--cp" in words else "16"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=jobs.environment({**VARIABLES, "CG_DEVICE": device}),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        url = _wait(process, log)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server, once it is ready."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the server has ended:\n{log.read_text()}"
        if address := re.search(r" at (http\S+)$", log.read_text(), re.MULTILINE):
            try:
                with urllib.request.urlopen(f"{address[1]}ready", timeout=10):
                    return address[1]
            except urllib.error.URLError:  # 503: the engine compiles
                pass
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready after {SECONDS} s:\n{log.read_text()}")


def complete(url: str, prompt: tuple[int, ...]) -> str:
    body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def check(case: Case, models: Models, folder: Path, device: str) -> None:
    """Each prompt is asked often enough for graphs to be captured, and replayed."""
    skip_if_lacking(case)
    with serving(models.words(case.command), folder / "log", device) as url:
        answers = [complete(url, prompt) for prompt in PROMPTS * 2]
    is_float8 = case.command.option("--kv-dtype") == "fp8"
    assert answers == generated(models.served_by(case.command), is_float8) * 2


@pytest.mark.parametrize("case", [*map(on_gpus, SERVERS)])
def test_on_gpus(case: Case, models: Models, tmp_path: Path) -> None:
    check(case, models, tmp_path, "cuda")


@pytest.mark.parametrize("case", [*map(on_the_host, SERVERS)])
def test_on_the_host(
    case: Case, models: Models, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    check(case, models, tmp_path, pytestconfig.getoption("--device"))


def test_the_server_is_run_on_one_rank_in_two_stages_and_cut() -> None:
    """On one, two and four GPUs."""
    serve = f"{Path('python')} -m examples.serve -n 1 --model DIR"
    assert [str(c.command) for c in cases(1) if c.command.name == "serve"] == [
        serve,
        f"{serve} --kv-dtype fp8",
        f"{serve} --draft ngram",
        f"{serve} --draft SMALL --draft-tokens 3",
    ]
    two = {c.id for c in cases(2) if c.command.name == "serve"}
    assert two >= {"serve-n2", "serve-n2-tp2", "serve-n2-ep2"}
