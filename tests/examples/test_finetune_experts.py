"""examples/finetune.py on mixtures of experts: adapters, shapes of ranks, and checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..models.quantized_folders import FORMS, write, write_mxfp4
from ..models.test_experts import FAMILIES, SIZES, correct_choices
from ..models.test_quantized_experts import model_of as mixture_of
from ..sampling import scale
from . import tiny_model
from .test_finetune import (
    SLOW,
    TINY,
    Texts,
    check_opens,
    documents,
    finetune,
    folders,
    losses,
    plain,
    refused,
    resumable,
    successors,
    train_plainly,
    transformers,
    tune,
    update_json,
    validation,
)

adapters = folders.adapters
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of a mixture of experts of two layers, with a tokenizer of bytes."""
    written: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in written:
            folder = written[family] = tmp_path_factory.mktemp(family)
            tiny_model.write(folder)  # for its tokenizer
            ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 256}
            sizes = SIZES | FAMILIES[family] | ids | {"vocab_size": 257}
            config = getattr(transformers, f"{family}Config")(
                **sizes | {"max_position_embeddings": 64}, initializer_range=0.3
            )
            torch.manual_seed(0)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            correct_choices(model)
            model.save_pretrained(folder)
        return written[family]

    return write


@pytest.fixture
def mixture(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("Mixtral")


# -- adapters -----------------------------------------------------------------------------------

PLACES = {"Mixtral": "--pp 2 --ep 2", "GptOss": "--pp 1 --dp 2 --ep 2 --fsdp step"}
"""Shapes of four ranks. peft gives Mixtral adapters of two sizes, and one to its router."""


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("GptOss", marks=SLOW)])
def test_adapters_of_experts(family: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """They train as peft's own do in one process, and peft opens what is saved."""
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    model, out = folder_of(family), tmp_path / "run"
    attention = "eager" if family == "GptOss" else "sdpa"
    more = f"--lora 3 --steps 3 --save-every 1 --keep 9 --attention {attention} --evaluate-every 0"
    tune(model, out, f"{more} {PLACES[family]}", ranks=4)
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    own = adapters.add_adapters(own, 3, model, seed=0)
    assert losses(out) == pytest.approx(train_plainly(own, model, 3)[0], rel=1e-5)
    runs = [out]
    if family == "GptOss":  # which has the time to go on with one rank
        runs.append(tmp_path / "again")
        resumable(out, runs[1], 2)
        tune(model, runs[1], f"{more} --pp 1 --resume", ranks=1)
        assert losses(runs[1]) == pytest.approx(losses(out), rel=1e-5)
    expected = {adapters.name_in_adapter(name): p for name, p in own.named_parameters()}
    for folder in (run / "checkpoints" / "step-000003" for run in runs):
        stored = load_file(folder / "adapter_model.safetensors")
        assert stored.keys() == expected.keys() - {None}
        assert sum(".experts." in name for name in stored) == 2 * 2 * 2
        for name, tensor in stored.items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-5)
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        opened = peft.PeftModel.from_pretrained(base, folder)
        ids = torch.arange(12).view(1, 12)
        torch.testing.assert_close(opened(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-4)


QUANTIZED = [
    ("Qwen3Moe", "packed", "--pp 1 --ep 2", 2),
    pytest.param("Mixtral", "gptq", "--pp 2 --ep 2", 4, marks=SLOW),
    pytest.param("GptOss", "mxfp4", "--pp 1 --ep 2", 2, marks=SLOW),
]


@pytest.mark.parametrize(("family", "name", "places", "ranks"), QUANTIZED)
def test_adapters_over_quantized_experts(
    family: str, name: str, places: str, ranks: int, tmp_path: Path
) -> None:
    """Losses are those of peft over the numbers that the weights stand for, which stay."""
    pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    folder, out = tmp_path / "quantized", tmp_path / "out"
    tiny_model.write(folder)  # for its tokenizer
    layers = ranks // 2  # one for each stage
    ids = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": None}
    base = mixture_of(family, **ids, num_hidden_layers=layers, max_position_embeddings=64)
    if name == "mxfp4":
        write_mxfp4(base, folder)
    else:
        write(base, folder, FORMS[name])
    before = (folder / "model.safetensors").read_bytes()
    attention = "eager" if family == "GptOss" else "sdpa"
    tune(
        folder,
        out,
        f"--steps 3 --lora 2 {places} --attention {attention} --evaluate-every 0",
        ranks,
    )
    assert (folder / "model.safetensors").read_bytes() == before
    saved = load_file(out / "checkpoints/step-000003/adapter_model.safetensors")
    assert sum(".experts." in key for key in saved) == layers * 2 * 2
    adapted = adapters.add_adapters(base, 2, folder, 0)
    assert losses(out) == pytest.approx(train_plainly(adapted, folder, 3)[0], rel=1e-5)


# -- balance and capacity -------------------------------------------------------------------------


@dataclass
class Reference:
    """What plain transformers does in one process, with its own loop over experts.

    Attributes:
        capacity: experts take so many choices as there would be in balance, times this.
        counts, dropped: of the last step.
    """

    model: Any
    capacity: float | None = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.model.set_experts_implementation("eager")
        self.modules = [m for m in self.model.modules() if hasattr(m, "has_gate")]
        for module in self.modules:
            module.register_forward_pre_hook(self._route)

    def _route(self, module: Any, args: tuple[Tensor, Tensor, Tensor]) -> Any:
        rows, ids, shares = args
        most = math.inf if self.capacity is None else ids.numel() / len(self.counts[0])
        most *= self.capacity or 1
        row, taken, shares = self.counts[self.modules.index(module)], Counter(), shares.clone()
        for token, chosen in enumerate(ids.tolist()):
            for choice, expert in enumerate(chosen):
                row[expert] += 1
                taken[expert] += 1
                if taken[expert] > most:
                    shares[token, choice] = 0
                    self.dropped += 1
        return rows, ids, shares

    def train(self, folder: Path, steps: int, auxiliary: float, z: float, correction: float) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = Texts.of(documents([]), tokenizer, 16, 60)
        optimizer, scheduler = finetune.trainers(self.model.parameters(), 1e-3, 0.0, steps)
        for step in range(steps):
            self.counts, self.dropped = [[0] * 4 for _ in self.modules], 0
            ids = texts.batch(step, 8, seed=0)
            losses = [self._loss(half, auxiliary, z) / 2 for half in ids.chunk(2)]
            self.losses.append(float(sum(losses)))
            sum(losses).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            biases = [b for n, b in self.model.named_buffers() if "correction_bias" in n]
            for bias, row in zip(biases, self.counts, strict=False):
                loads = torch.tensor(row).float()
                bias += correction * torch.sign(loads.mean() - loads)
        return self

    def _loss(self, ids: Tensor, auxiliary: float, z: float) -> Tensor:
        extra = {"output_router_logits": True} if auxiliary else {}
        output = self.model(input_ids=ids, use_cache=False, **extra)
        loss = cross_entropy(output.logits.flatten(0, 1), successors(ids).flatten())
        if auxiliary:
            logs = torch.cat(output.router_logits).logsumexp(-1)
            loss = loss + auxiliary * output.aux_loss + z * logs.square().mean()
        return loss


BALANCED = {
    "losses of balance": ("Mixtral", "--pp 2 --ep 2 --z-loss 0.05", None, (0.3, 0.05, 0.0)),
    "capacity": ("Qwen3Moe", "--dp 2 --ep 2 --pp 1 --capacity 0.8", 0.8, (0.0, 0.0, 0.0)),
    "correction": ("DeepseekV3", "--pp 2 --ep 2 --correction 0.02", None, (0.0, 0.0, 0.02)),
    "all of it": (
        "Olmoe",
        "--dp 2 --ep 2 --pp 1 --fsdp step --capacity 1.0 --z-loss 0.05",
        1.0,
        (0.3, 0.05, 0.0),
    ),
    "a cut sequence": (
        "Qwen3Moe",
        "--dp 1 --ep 2 --cp 2 --pp 1 --capacity 0.8 --z-loss 0.05",
        0.8,
        (0.3, 0.05, 0.0),
    ),
}
"""For each the family, options, and for the reference the capacity, and its `train`'s numbers."""


@pytest.mark.parametrize(
    "name",
    [n if n == "losses of balance" else pytest.param(n, marks=SLOW) for n in BALANCED],
)
def test_balance(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses, norms, counts and saved weights are those of one process that has the whole batch."""
    family, more, capacity, numbers = BALANCED[name]
    folder, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(folder_of(family), folder)
    if numbers[0]:
        update_json(folder / "config.json", output_router_logits=True, router_aux_loss_coef=0.3)
    output = tune(folder, out, f"{more} --steps 3 --save-every 3 --evaluate-every 0", ranks=4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference = Reference(plain, capacity).train(folder, 3, *numbers)
    figures = json.loads((out / "figures.json").read_text())
    assert figures["losses"] == pytest.approx(reference.losses, rel=1e-5)
    assert figures["norms"] == pytest.approx(reference.norms, rel=1e-4)
    experts = figures["experts"]
    assert experts["last"] == reference.counts
    assert experts["dropped"][-1] == reference.dropped
    assert (reference.dropped > 0) == (capacity is not None)
    assert f"{reference.dropped} choices dropped" in output
    assert sum(map(sum, experts["counts"])) == 3 * sum(map(sum, experts["last"]))
    saved = out / "checkpoints" / "step-000003"
    check_opens(saved)
    opened = transformers.AutoModelForCausalLM.from_pretrained(saved)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(opened.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)


def test_options_for_experts_that_a_model_lacks(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tmp_path / "dense"
    tiny_model.write(dense, num_hidden_layers=2)
    words = ["--out", tmp_path / "out", *TINY.split()]
    message = refused(monkeypatch, "--model", dense, *words, "--capacity", "2")
    assert message.startswith("LlamaForCausalLM has no mixtures of experts in the form of")
    words = ["--model", folder_of("Mixtral"), *words]
    message = refused(monkeypatch, *words, "--correction", "0.1")
    assert message.startswith("the routers of MixtralForCausalLM have no biases that --correction")


# -- shapes of ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("DeepseekV3", marks=SLOW)])
def test_experts_over_ranks(family: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses are those of plain transformers; other `--ep` go on, with experts in their order."""
    mixture, first = folder_of(family), tmp_path / "first"
    more = "--pp 1 --dp 2 --ep 2 --dispatch exchange --steps 3 --save-every 1 --keep 9"
    more += " --tasks-in-flight 2"
    tune(mixture, first, more, ranks=4)
    expected, judged = plain(mixture, 3)
    assert losses(first) == pytest.approx(expected, rel=1e-5)
    norms = json.loads((first / "figures.json").read_text())["norms"]
    shapes = [("--pp 1 --ep 4 --fsdp step --sample 2", 4), ("--pp 2", 2)]
    for shape, ranks in shapes[: 1 if scale() == 1 else 2]:
        out = tmp_path / shape
        resumable(first, out, 2)
        tune(mixture, out, f"{shape} --steps 3 --resume --evaluate-every 3", ranks=ranks)
        assert losses(out) == pytest.approx(expected, rel=1e-5)
        assert validation(out) == pytest.approx(judged, rel=1e-5)
        assert json.loads((out / "figures.json").read_text())["norms"] == pytest.approx(norms, 1e-4)
        saved = out / "checkpoints" / "step-000003"
        check_opens(saved)
        tensors = (
            load_file(f / "model.safetensors") for f in (saved, first / saved.relative_to(out))
        )
        torch.testing.assert_close(next(tensors), next(tensors), rtol=1e-4, atol=2e-5)


def test_implementations_of_experts(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "make_steps", _tells_experts)
    words = ["--model", mixture, "--out", tmp_path / "out", *TINY.split()]
    assert refused(monkeypatch, *words) == "cg"
    assert refused(monkeypatch, *words, "--experts", "batched_mm") == "batched_mm"
    message = refused(monkeypatch, *words, "--experts", "other")
    assert message.startswith("there are no experts='other'; there are batched_mm, cg, ")
    words[1] = tmp_path / "dense"
    tiny_model.write(words[1], num_hidden_layers=2)
    message = refused(monkeypatch, *words, "--experts", "cg")
    assert message.startswith("experts='cg' is asked for, and LlamaForCausalLM has no experts of")


def _tells_experts(cuts: Any, *_: Any) -> None:
    raise SystemExit(cuts.model.config._experts_implementation)
