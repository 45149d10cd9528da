"""examples/finetune.py on a tiny model: shapes of ranks, adapters, checkpoints, what it refuses."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from torch import Tensor
from torch.nn.functional import cross_entropy

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..mpi.jobs import ROOT, needs_mpi, run

transformers = pytest.importorskip("transformers")

from transformers import dynamic_module_utils  # noqa: E402

from ..models import quantized_folders  # noqa: E402 (it needs transformers)
from . import tiny_model  # noqa: E402

sys.path.insert(0, str(ROOT / "examples"))

import adapters  # noqa: E402 (found by the line above)
import borders  # noqa: E402
import finetune  # noqa: E402
import folders  # noqa: E402
import weight_files  # noqa: E402
from texts import IGNORED, Texts, documents, successors  # noqa: E402

from examples.serve import __main__ as serving  # noqa: E402
from examples.serve.opening import open_model  # noqa: E402

pytestmark = pytest.mark.timeout(600)
SLOW = pytest.mark.slow

SCRIPT = str(ROOT / "examples" / "finetune.py")
TINY = "--length 16 --windows 60 --batch 8 --microbatches 2 --rate 1e-3 --sample 0"


def options(model: Path, out: Path, more: str) -> list[str]:
    return [SCRIPT, "--model", str(model), "--out", str(out), *TINY.split(), *more.split()]


def tune(model: Path, out: Path, more: str, ranks: int = 2) -> str:
    """Fine-tune on ranks that this process plays; what is written."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text), redirect_stderr(text):
        patch.setattr(sys, "argv", options(model, out, more))
        with use_world(VirtualWorld(ranks)):
            finetune.main()
    return text.getvalue()


def losses(out: Path) -> list[float]:
    found: list[float] = json.loads((out / "figures.json").read_text())["losses"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write(folder, num_hidden_layers=2)  # a layer each for two stages
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on 2 ranks of one process, with a checkpoint after each step."""
    out = tmp_path_factory.mktemp("whole") / "run"
    more = "--steps 6 --save-every 1 --keep 9 --sample 2 --evaluate-every 3 --prompt hello"
    output = tune(model, out, f"{more} --trace {out / 'trace.json'}")
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert "uses model.embed_tokens.weight of stage 0" in output
    assert output.count("hello") == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    return out


def plain(
    model: Path, steps: int, labels_of: Callable[[Tensor], Tensor] = successors
) -> tuple[list[float], float]:
    """The losses of plain transformers in one process, and that of the validation at the end."""
    trained = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True)
    return train_plainly(trained, model, steps, labels_of)


def train_plainly(
    trained: Any, folder: Path, steps: int, labels_of: Callable[[Tensor], Tensor] = successors
) -> tuple[list[float], float]:
    """Train a model of a folder in one process: the losses, and that of the validation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = Texts.of(documents([]), tokenizer, 16, 60)
    optimizer, scheduler = finetune.trainers(trained.parameters(), 1e-3, 0.0, steps)
    found = []
    for step in range(steps):
        ids = texts.batch(step, 8, seed=0)
        loss = mean_loss(trained, ids, labels_of(ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(float(loss.detach()))
    judged = mean_loss(trained, texts.validation, successors(texts.validation))
    return found, float(judged.detach())


def mean_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())


def validation(out: Path) -> float:
    """The last validation loss of a run."""
    found: float = json.loads((out / "figures.json").read_text())["validation"][-1][1]
    return found


def test_losses_are_those_of_plain_transformers(model: Path, whole: Path) -> None:
    """Also that of the three validation windows, whose batch the first ones fill again."""
    expected, judged = plain(model, 6)
    assert losses(whole) == pytest.approx(expected, rel=1e-5)
    assert validation(whole) == pytest.approx(judged, rel=1e-5)
    checkpoints = sorted((whole / "checkpoints").iterdir())
    assert [each.name for each in checkpoints] == [f"step-{n:06d}" for n in range(1, 7)]
    for each in checkpoints:
        check_opens(each)


def few(ids: Tensor, _: Tensor | None = None) -> Tensor:
    """Labels of which row r of a batch keeps r: the first microbatches of four have 1 and 5."""
    labels = successors(ids)
    kept = torch.arange(len(ids))[:, None] > torch.arange(ids.shape[1])
    return labels.where(kept, IGNORED)


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (1, "--microbatches 1"),
        pytest.param(2, "--pp 2 --microbatches 4", marks=SLOW),
        (2, "--pp 1 --dp 2 --microbatches 4"),
    ],
)
def test_each_label_counts_once(
    ranks: int, shape: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microbatches have 1 label to 13, and rows along dp differ as well."""
    monkeypatch.setattr(finetune, "successors", few)
    tune(model, tmp_path, f"{shape} --steps 2 --evaluate-every 0", ranks)
    assert losses(tmp_path) == pytest.approx(plain(model, 2, few)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        pytest.param(1, "--pp 1", marks=SLOW),
        pytest.param(3, "--pp 1 --cp 3", marks=SLOW),
        pytest.param(2, "--pp 1 --cp 2 --fsdp step", marks=SLOW),
        pytest.param(4, "--pp 1 --cp 2 --tp 2", marks=SLOW),
        pytest.param(4, "--pp 1 --cp 2 --tp 2 --sequence-parallel --cp-order zigzag", marks=SLOW),
        pytest.param(8, "--pp 2 --dp 2 --tp 2 --sequence-parallel --schedule zb-h1", marks=SLOW),
        (4, "--pp 2 --cp 2 --cp-form ring --cp-order zigzag --schedule zb-h1"),
        pytest.param(4, "--pp 2 --cp 2 --schedule zb-h1", marks=SLOW),
        pytest.param(4, "--pp 2 --cp 2 --attention flex_attention --schedule zb-h1", marks=SLOW),
    ],
)
def test_documents_are_packed_with_borders(
    ranks: int, shape: str, model: Path, tmp_path: Path
) -> None:
    """The loss is that of each document by itself, of all their labels alike."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [json.dumps({"text": letters[n : n + 1 + n * 7 % 11]}) for n in range(26)] * 10
    file = tmp_path / "short.jsonl"
    file.write_text("\n".join(lines))
    tune(model, tmp_path / "run", f"--pack --data {file} --steps 1 {shape}", ranks)
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    texts = Texts.of(documents([file]), transformers.AutoTokenizer.from_pretrained(model), 16, 60)
    ids, positions = texts.packed(0, 8, seed=0)
    total, count = 0.0, 0
    for row, places in zip(ids, positions, strict=True):
        begins = torch.nonzero(places == 0).flatten().tolist()
        for start, end in itertools.pairwise([*begins, 16]):
            document = row[None, start:end]
            logits = trained(document).logits[0, :-1]
            total += float(cross_entropy(logits, document[0, 1:], reduction="sum").detach())
            count += end - start - 1
    assert len(torch.nonzero(positions == 0)) > 20, "there are borders"
    assert losses(tmp_path / "run") == pytest.approx([total / count], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shape", "shape_over_cp"),
    [
        ((2, 2), "--pp 1 --tp 2", "--pp 1 --cp 2 --pack"),
        ((2, 4), "--pp 1 --tp 2", "--pp 1 --cp 2 --tp 2"),
        ((4, 4), "--pp 2 --tp 2", "--pp 2 --cp 2 --fsdp step"),
    ],
)
def test_attention_over_cut_tokens_drops_the_same(
    ranks: tuple[int, int], shape: str, shape_over_cp: str, tmp_path: Path
) -> None:
    """A model with `attention_dropout`, of whose text each window is one document."""
    model = tmp_path / "model"
    tiny_model.write(model, num_hidden_layers=2, attention_dropout=0.3)
    runs = []
    for name, count, options_of_run in zip(
        ("plain", "over-cp"), ranks, (shape, shape_over_cp), strict=True
    ):
        out = tmp_path / name
        tune(model, out, f"{options_of_run} --dropout --steps 2 --evaluate-every 0", count)
        runs.append(losses(out))
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_a_model_whose_documents_see_each_other_is_refused(model: Path) -> None:
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)

    def evaluate(use_cache: bool, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """With a cache, transformers masks by no positions."""
        logits = trained(ids, position_ids=positions, use_cache=use_cache).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten()).detach()

    borders.check(functools.partial(evaluate, False), 4, 16, 257)
    with pytest.raises(ValueError, match="does not mask by positions that begin anew; leave out"):
        borders.check(functools.partial(evaluate, True), 4, 16, 257)


def test_a_table_that_the_model_makes_as_it_runs(tmp_path: Path) -> None:
    """Its rotary embedding keeps a tensor in an attribute, which no folder has; it is resumed."""
    model, out = tmp_path / "model", tmp_path / "run"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    untied = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    tiny_model.write(model, rope_parameters=rotary | factors, **untied)
    tune(model, out, "--steps 1 --pp 2")
    tune(model, out, "--steps 2 --pp 1 --resume", ranks=1)
    assert losses(out) == pytest.approx(plain(model, 2)[0], rel=1e-5)
    check_opens(out / "checkpoints" / "step-000002")


def test_a_folder_with_other_names_than_the_model(tmp_path: Path, model: Path) -> None:
    """A GPT-NeoX, whose head its folder calls otherwise; checkpoints have the folder's names."""
    folder, out = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    config = transformers.GPTNeoXConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    output = tune(folder, out, "--steps 1 --pp 2")
    assert output.count(f"the weights in {folder}, 1 under other names") == 1
    tune(folder, out, "--steps 2 --pp 1 --resume", ranks=1)
    assert losses(out) == pytest.approx(plain(folder, 2)[0], rel=1e-5)
    saved = out / "checkpoints" / "step-000002"
    check_opens(saved)
    names = (load_file(f / "model.safetensors").keys() for f in (saved, folder))
    assert next(names) == next(names)


def check_opens(folder: Path) -> None:
    """A checkpoint is a model, and all of it."""
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert found.dtype == torch.float32
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    transformers.AutoTokenizer.from_pretrained(folder)


def resumable(whole: Path, out: Path, step: int) -> None:
    """A run that has come to a step, as it would be found."""
    (out / "checkpoints").mkdir(parents=True)
    name = f"step-{step:06d}"
    shutil.copytree(whole / "checkpoints" / name, out / "checkpoints" / name)


@pytest.mark.parametrize(
    "shape",
    [
        "--pp 1 --dp 2 --fsdp step --float8 --bf16",
        pytest.param("--pp 2 --float8 rowwise", marks=SLOW),
        pytest.param("--pp 2 --float8 --lora 2", marks=SLOW),
    ],
)
def test_layers_in_float8(shape: str, model: Path, tmp_path: Path) -> None:
    """All linear layers but the head, whose losses differ a little."""
    plain_shape = shape.replace("--float8 rowwise", "").replace("--float8", "")
    tune(model, tmp_path / "plain", f"{plain_shape} --steps 2 --evaluate-every 0", 2)
    tune(model, tmp_path / "run", f"{shape} --steps 2 --evaluate-every 0", 2)
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "plain")
    assert found == pytest.approx(expected, rel=2e-2)
    assert found != pytest.approx(expected, rel=1e-6), "it computes in float8"


REST = "--steps 6 --resume --evaluate-every 0"


@pytest.mark.parametrize(
    "shape",
    [
        "--pp 1 --dp 2 --tp 2",
        pytest.param("--pp 2 --dp 2 --fsdp step", marks=SLOW),
        pytest.param("--pp 2 --dp 2 --schedule zb-h1", marks=SLOW),
        pytest.param("--pp 2 --tp 2", marks=SLOW),
        pytest.param("--pp 2 --dp 2 --fuse inductor", marks=SLOW),
    ],
)
def test_another_shape_goes_on(shape: str, model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    resumable(whole, out, 4)
    assert "goes on from" in tune(model, out, f"{shape} {REST}", ranks=4)
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5)
    check_opens(out / "checkpoints" / "step-000006")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs_mpi)])
def test_mpi_ranks_go_on(ranks: int, model: Path, whole: Path, tmp_path: Path) -> None:
    """Each reads and writes its own; by a schedule that splits backwards."""
    out = tmp_path / "run"
    resumable(whole, out, 4)
    given = options(model, out, f"--pp 2 --schedule zb-h1 {REST}")
    ended = run(ranks, given, seconds=240, folder=tmp_path, warm=True)
    assert ended.code == 0, ended.output
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5)
    check_opens(out / "checkpoints" / "step-000006")


def test_the_same_shape_goes_on_bit_for_bit(model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    resumable(whole, out, 3)
    tune(model, out, REST)
    assert losses(out) == losses(whole)


def test_adapters_open_with_peft(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    out = tmp_path / "run"
    more = "--lora 4 --bf16 --save-every 2 --evaluate-every 0"
    tune(model, out, f"{more} --steps 2")
    tune(model, out, f"{more} --steps 3 --resume")
    folder = out / "checkpoints" / "step-000003"
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.PeftModel.from_pretrained(base, folder)
    moved = [p.abs().sum() for name, p in adapted.named_parameters() if "lora_B" in name]
    assert len(moved) == 2 * 7
    assert all(moved)
    assert (folder / "adapter_model.safetensors").stat().st_size < 50_000, "adapters alone"


# -- kill -9 ------------------------------------------------------------------------------------


@pytest.mark.slow  # `tests/models/test_interrupted_saves.py` stops a save at each of its calls
@pytest.mark.timeout(4000)
def test_killed_at_any_moment(model: Path, whole: Path, tmp_path: Path) -> None:
    """Each time it goes on from what was complete, and comes to the same losses, bit for bit.

    Nothing is evaluated: that writes nothing, and most of the kills would be in its trace.
    """
    kills = 30
    job = str(Path(__file__).with_name("killing_job.py"))
    more = "--steps 6 --save-every 1 --keep 9 --resume --evaluate-every 0"
    words = [SCRIPT, "--model", str(model), *TINY.split(), *more.split()]
    ended = run(
        0,
        [job, str(kills), str(tmp_path), *words],
        seconds=120.0 * kills,
        variables={"CG_RANKS": "2"},
        folder=tmp_path,
    )
    assert ended.code == 0, ended.output
    assert f"{kills} kills" in ended.output
    runs = sorted(tmp_path.glob("run*"))
    assert runs
    for out in runs:
        assert losses(out) == losses(whole)


# -- what it refuses ----------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, *given: Any) -> str:
    """The message by which it refuses its arguments, in this process."""
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, given)])
    with pytest.raises(SystemExit) as caught:
        finetune.main()
    return str(caught.value.code)


def test_folders_that_cannot_be_tuned(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert "is no folder of a model: it has no config.json" in refused(
        monkeypatch, "--model", tmp_path, "--out", out
    )
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    message = refused(monkeypatch, "--model", broken, "--out", out)
    assert re.search(r"cannot be fine-tuned: .* has neither model.safetensors nor", message)
    shutil.copy(model / "model.safetensors", broken)
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused(monkeypatch, "--model", broken, "--out", out)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    message = refused(monkeypatch, "--model", broken, "--out", out)
    assert "has tensors that LlamaForCausalLM has not: 'model.layers.1" in message
    message = refused(monkeypatch, "--model", model, "--out", whole, *TINY.split())
    assert "has checkpoints: go on with --resume, or give another --out" in message
    assert not out.exists()


@pytest.fixture
def grown(model: Path, tmp_path: Path) -> Path:
    """A folder to whose tokenizer a token was added, and whose model was left as it was."""
    folder = tmp_path / "grown"
    shutil.copytree(model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    return folder


OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output
"""
OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def update_json(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.fixture
def own_code(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model halves its logits, by code of its own."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    shutil.copytree(model, folder)
    (folder / "own_model.py").write_text(OWN_MODEL)
    (folder / "own_tokenizer.py").write_text(OWN_TOKENIZER)
    classes = {"AutoConfig": "own_model.OwnConfig"}
    classes["AutoModelForCausalLM"] = "own_model.OwnForCausalLM"
    update_json(folder / "config.json", model_type="own", auto_map=classes)
    return folder


def test_code_of_the_folder(own_code: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """It runs where it is trusted alone, and checkpoints have it."""
    out = tmp_path / "out"
    message = f"{own_code} needs Python code that it brings: read it, and give --trust-remote-code"
    assert refused(monkeypatch, "--model", own_code, "--out", out).startswith(message)
    tune(own_code, out, "--steps 2 --trust-remote-code --evaluate-every 0")
    assert losses(out) == pytest.approx(plain(own_code, 2)[0], rel=1e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        out / "checkpoints" / "step-000002", trust_remote_code=True
    )
    assert type(saved).__name__ == "OwnForCausalLM"


def test_a_tokenizer_that_is_code_of_the_folder(own_code: Path) -> None:
    classes = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    update_json(
        own_code / "tokenizer_config.json", auto_map=classes, tokenizer_class="OwnTokenizer"
    )
    with pytest.raises(SystemExit, match="give --trust-remote-code to run it"):
        finetune.read_tokenizer(own_code)
    tokenizer = finetune.read_tokenizer(own_code, trust_remote_code=True)
    assert type(tokenizer).__name__ == "OwnTokenizer"


def test_a_token_beyond_the_embedding(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is compiled, and the remedy is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text with <new> in it " * 9)
    given = f"--out out --data text.txt {TINY}".split()
    message = refused(monkeypatch, "--model", grown, *given)
    assert message.startswith(
        f"the text has the token '<new>' of id 257, and the embedding of {grown} has 257 rows, "
        "while the tokenizer has 258 tokens, added ones included. "
    )
    *_, command = message.split("\n")
    monkeypatch.setattr(finetune, "make_stages", _goes_on)
    exec(command.split('"')[1])
    assert refused(monkeypatch, "--model", grown, *given) == "it goes on"


def _goes_on(*_: Any) -> None:
    raise SystemExit("it goes on")


def test_a_token_beyond_the_embedding_that_no_text_has_does_no_harm(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "make_stages", _goes_on)
    given = ["--model", grown, "--out", "out", *TINY.split()]
    assert refused(monkeypatch, *given) == "it goes on"
    prompt = ["--sample", 2, "--prompt", "go <new>"]
    message = refused(monkeypatch, *given, *prompt)
    assert message.startswith("--prompt has the token '<new>' of id 257")


QUANTIZED: dict[str, tuple[dict[str, Any], torch.dtype | None, str]] = {
    "of a name": ({"quant_method": "fp8", "fmt": "e4m3"}, torch.float8_e4m3fn, "fp8 has weight_b"),
    "of a name alone": ({"quant_method": "torchao"}, None, "format 'torchao' is not"),
    "fp8 by type": ({}, torch.float8_e4m3fn, r"'model.*' is F8_E4M3"),
    "int8 by type": ({}, torch.int8, r"'model.*\.weight' is I8"),
}


@pytest.fixture(params=QUANTIZED)
def quantized(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> tuple[Path, str]:
    """A folder whose weights need their scales, and what says so."""
    settings, dtype, says = QUANTIZED[request.param]
    folder = tmp_path / "quantized"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    if settings:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    if dtype is not None:
        tensors = load_file(folder / "model.safetensors")
        for name in [each for each in tensors if "proj" in each]:
            tensors[name + "_scale"] = torch.tensor(0.01)
            tensors[name] = (tensors[name] / 0.01).to(dtype)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, says


def test_quantized_weights(
    quantized: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that are not read are refused by both programs, before anything is loaded."""
    folder, says = quantized
    monkeypatch.setattr(folders.cg, "pretrained", _goes_on)
    told = refused(monkeypatch, "--model", folder, "--out", tmp_path / "out", *TINY.split())
    assert serving.main(["--model", str(folder), "--port", "0"]) == serving.BAD_USAGE
    for message in (told, capsys.readouterr().err):
        assert re.search(f"the weights in {folder} are quantized: .*{says}", message)
        assert "Give a folder of the same model with weights in bfloat16" in message
    with pytest.raises(ValueError, match=f"the weights in {folder} are quantized: .*{says}"):
        open_model(folder)


def test_quantized_weights_are_trained_by_adapters_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(model, folder)
    trained = transformers.AutoModelForCausalLM.from_pretrained(model)
    quantized_folders.write(trained, folder, quantized_folders.FORMS["gptq"])
    given = ("--model", folder, "--out", tmp_path / "out", *TINY.split())
    told = refused(monkeypatch, *given)
    assert "its weights are quantized (gptq), and steps of an optimizer would be lost" in told
    assert "Give --lora RANK, which trains adapters beside them" in told


@pytest.mark.parametrize("name", ["fp8", pytest.param("gptq", marks=SLOW), "nf4, nested"])
def test_adapters_over_quantized_weights(name: str, model: Path, tmp_path: Path) -> None:
    """Losses are those of peft over the numbers that the weights stand for."""
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    form = (quantized_folders.FORMS | quantized_folders.BYTES)[name]
    folder, out = tmp_path / "quantized", tmp_path / "out"
    shutil.copytree(model, folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    quantized_folders.write(base, folder, form)
    before = (folder / "model.safetensors").read_bytes()
    tune(folder, out, "--steps 3 --lora 2 --pp 2 --evaluate-every 0")
    assert (folder / "model.safetensors").read_bytes() == before
    saved = load_file(out / "checkpoints/step-000003/adapter_model.safetensors")
    assert all("lora_" in key and tensor.dtype is torch.float32 for key, tensor in saved.items())
    adapted = adapters.add_adapters(base, 2, folder, 0)
    assert isinstance(adapted, peft.PeftModel)
    assert losses(out) == pytest.approx(train_plainly(adapted, folder, 3)[0], rel=1e-5)


def test_tensors_of_integers_that_are_no_weights(tmp_path: Path) -> None:
    """Old folders have masks and positions; nothing is said of damaged files here."""
    tensors = {
        "h.0.attn.bias": torch.ones(2, 2, dtype=torch.uint8),
        "position_ids": torch.arange(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_files.quantization(tmp_path) is None
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"damaged")
    assert weight_files.quantization(tmp_path) is None


def test_a_head_that_is_not_the_embedding(model: Path, tmp_path: Path) -> None:
    """What is stored counts, and not the configuration, as in transformers."""
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    output = tune(folder, out, "--steps 2 --evaluate-every 0")
    line = "has a head that is not its embedding, so it is used, although config.json says"
    assert output.count(line) == 1
    assert losses(out) == pytest.approx(plain(folder, 2)[0], rel=1e-5)
    assert losses(out) != pytest.approx(plain(model, 2)[0], rel=1e-5)
    found = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoints/step-000002")
    assert not torch.equal(found.lm_head.weight, found.model.embed_tokens.weight)
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    output = tune(folder, tmp_path / "same", "--steps 2 --evaluate-every 0")
    assert line not in output
    assert losses(tmp_path / "same") == pytest.approx(plain(model, 2)[0], rel=1e-5)


@pytest.mark.parametrize("table", ["transformer.wpe", "model.decoder.embed_positions"])
def test_more_tokens_than_learned_positions(
    table: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if table == "transformer.wpe":
        config = transformers.GPT2Config(
            vocab_size=257, n_positions=12, n_embd=16, n_layer=1, n_head=2
        )
    else:
        config = transformers.OPTConfig(
            vocab_size=257,
            max_position_embeddings=12,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    folder = tmp_path / "learned"
    shutil.copytree(model, folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    monkeypatch.setattr(finetune, "make_stages", _goes_on)
    given = ["--model", folder, "--out", tmp_path / "out", *TINY.split()]
    assert refused(monkeypatch, *given) == (
        f"--length 16 is more than the 12 positions of {folder}: {table} has a row for each, and "
        "no more. Give --length 12 or less"
    )
    assert refused(monkeypatch, *given, "--length", "12") == "it goes on"


def test_more_tokens_than_positions_that_are_computed(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(finetune, "make_stages", _goes_on)
    given = ["--model", model, "--out", tmp_path / "out", *TINY.split(), "--length", "65"]
    assert refused(monkeypatch, *given) == "it goes on"
    assert "--length 65 is more than the 64 positions that" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--pp 2", "--pp 2 x --dp 1 x --ep 1 x --cp 1 x --tp 1 are 2 ranks, and there are 1"),
        ("--batch 6", "--batch 6 does not divide into 4 microbatches"),
        ("--attention flash_attention_2", "invalid choice: 'flash_attention_2'"),
        ("--data no.txt", "--data: there is no file no.txt"),
        ("--steps 0", "--steps must be at least 1"),
        ("--pp 1 --fsdp step", "ranks of --dp, --ep and --cp: give one above 1"),
        ("--lora 2 --correction 0.1", "--correction moves biases of the model, which folders of"),
        ("--capacity 0", "--capacity 0.0 must be above 0"),
    ],
)
def test_options_that_do_not_fit(
    given: str,
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(monkeypatch, "--model", model, *given.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--cp 4 --sequence-parallel", "cuts tokens along --tp: give --tp above 1"),
        ("--cp 4 --attention eager", "--cp with --attention eager: give sdpa or flex_attention"),
        ("--cp 4 --length 3", "--length 3: give each rank of --cp 4 a token or more"),
    ],
)
def test_options_that_do_not_fit_shared_tokens(
    given: str,
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with use_world(VirtualWorld(4)):
        refused(monkeypatch, "--model", model, "--pp", "1", *given.split())
    assert message in capsys.readouterr().err


def test_more_stages_than_layers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "homes", lambda schedule, groups: [0] * 5)
    message = refused(monkeypatch, "--model", model, "--out", tmp_path / "out", *TINY.split())
    assert "5 stages are asked for, and LlamaForCausalLM has 2 layers" in message


# -- data ---------------------------------------------------------------------------------------


def test_documents_of_files(tmp_path: Path) -> None:
    text, table, bad = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl"))
    text.write_text("one\ntwo")
    chat = [{"role": "user", "content": "hello"}]
    table.write_text(f'{{"text": "three"}}\n{json.dumps({"messages": chat})}')
    assert list(documents([text, table])) == ["one\ntwo", "three", chat]
    bad.write_text('{"text": "x"}\n{"other": 1}')
    with pytest.raises(ValueError, match=r'c.jsonl:2 is no JSON object with "text" or "messages"'):
        list(documents([bad]))


@pytest.mark.parametrize("single", ["<s> $A", "$A <end>", "<s> $A <end>"])
@pytest.mark.parametrize("ends", ["<end>", ""])
def test_a_template_writes_the_ends_of_chats(
    single: str, ends: str, model: Path, tmp_path: Path
) -> None:
    """Those that the tokenizer would add do not come twice, nor those between documents."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    specials = [("<s>", tokenizer.bos_token_id), ("<end>", tokenizer.eos_token_id)]
    process = processors.TemplateProcessing(single=single, special_tokens=specials)
    tokenizer.backend_tokenizer.post_processor = process
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}" + ends
    tokenizer.save_pretrained(tmp_path)
    found = finetune.read_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    whole = found.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert whole.count(found.bos_token_id) == 1
    document = whole if ends else [*whole, found.eos_token_id]
    texts = Texts.of([chat] * 4, found, len(document), most=9)
    assert torch.cat([texts.train, texts.validation]).tolist() == [document] * 4
    plain = found("hello")["input_ids"]
    document = plain if plain[-1] == found.eos_token_id else [*plain, found.eos_token_id]
    texts = Texts.of(["hello"] * 4, found, len(document), most=9)
    assert torch.cat([texts.train, texts.validation]).tolist() == [document] * 4


def test_truncation_and_padding_of_a_tokenizer_are_ignored(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.backend_tokenizer.enable_padding(length=300)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = Texts.of(["x" * 199], finetune.read_tokenizer(tmp_path), 20, most=99)
    assert len(texts.train) + len(texts.validation) == 10


def test_a_line_of_json_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    separators = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
    table, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    kept = "\u2028\u2029\x85"  # which JSON allows in a string as they are
    lines = [json.dumps({"text": f"a{kept}b"}, ensure_ascii=False), json.dumps({"text": "c"})]
    table.write_bytes("\ufeff{}\r\n\r{}\r\n".format(*lines).encode())
    text.write_bytes(f"\ufeffone{separators}two".encode())
    assert list(documents([table, text])) == [f"a{kept}b", "c", f"one{separators}two"]
    table.write_text('{"text": "a"}\n{"text": "b\x0cc"}')
    with pytest.raises(ValueError, match=r"a.jsonl:2 is no JSON object .* Invalid control char"):
        list(documents([table]))


def test_batches_follow_from_the_step(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = Texts.of(["0123456789" * 20], tokenizer, 8, most=100)
    assert texts.train.shape == (24, 8)
    assert len(texts.validation) == 1
    stream = torch.cat([texts.train, texts.validation]).flatten().tolist()
    assert tokenizer.decode(stream) == ("0123456789" * 20)[:200]
    first = torch.cat([texts.batch(step, 6, seed=1) for step in range(4)])
    assert torch.equal(first.sort(0).values, texts.train.sort(0).values), "each window once"
    assert torch.equal(first[6:12], texts.batch(1, 6, seed=1))
    again = torch.cat([texts.batch(step, 6, seed=1) for step in range(4, 8)])
    assert not torch.equal(first, again)
    with pytest.raises(ValueError, match="the texts are 4 tokens, and two windows of 8 are the"):
        Texts.of(["abc"], tokenizer, 8, most=9)
