"""Folders of weights: read piece by piece, written whole, and what is wrong with some of them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .families import model_of, transformers
from .training import TrainedPart, batch, training_step

pytestmark = pytest.mark.timeout(300)

LAYERS = 2
Shape = tuple[int, int, int]
"""Stages, and ranks along dp and tp of each."""


def empty(family: str, layers: int = LAYERS) -> Any:
    with cg.empty_weights():
        return model_of(family, layers)


def place(cuts: Any, shape: Shape, weights: Any) -> list[Any]:
    """An actor for each stage, with the weights of a folder."""
    stages, dp, tp = shape
    size = dp * tp
    rows = "forward({0})|loss({0})"
    plan = cg.plan(
        {
            "|".join(rows.format(n) for n in ("moving", "input_ids")) + "|loss(labels)": cg.cut(
                0, "dp"
            )
        }
    ) | cg.plans.hf(cuts.model, batch=None)
    actors = []
    for index in range(stages):
        if size == 1:
            actors.append(TrainedPart.on(index, init=weights)(cuts, index))
        else:
            grid = cg.mesh(range(index * size, (index + 1) * size), dp=dp, tp=tp)
            actors.append(TrainedPart.on(grid, plan=plan, init=weights)(cuts, index))
    return actors


def run(folder: Path, family: str, shape: Shape, steps: range, save: Path | None = None) -> Any:
    """Train on from a folder, a checkpoint or a model; the losses."""
    with use_world(VirtualWorld(shape[0] * shape[1] * shape[2])):
        cuts = cg.cut_layers(empty(family), shape[0])
        actors = place(cuts, shape, cg.pretrained(folder))
        compiled = training_step(actors, cuts).lower(*batch(0)).compile()
        if (folder / "training").exists():
            state = cg.load_checkpoint(folder, actors, compiled=compiled)
            assert state == {"done": steps.start}
        losses = [float(compiled(*batch(number))) for number in steps]
        if save is not None:
            cg.save_checkpoint(
                save,
                actors,
                compiled=compiled,
                state={"done": steps.stop},
                like=folder,
                largest=4000,
            )
    return losses


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models as their library saves them: in one file, and in several."""
    found = {}
    for family, size in (("Llama", "1GB"), ("GPT2", "8KB")):
        found[family] = tmp_path_factory.mktemp(family)
        model_of(family, LAYERS).save_pretrained(found[family], max_shard_size=size)
    assert len(list(found["GPT2"].glob("*.safetensors"))) > 1
    return found


@pytest.mark.parametrize("family", [pytest.param("Llama", marks=pytest.mark.slow), "GPT2"])
def test_another_shape_goes_on(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks save, a mesh goes on, and both train as plain torch does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[family])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    wanted = []
    for number in range(4):
        ids, labels = batch(number)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        wanted.append(float(loss.detach()))
    first = run(folders[family], family, (2, 1, 1), range(2), tmp_path / "step-2")
    same = run(tmp_path / "step-2", family, (2, 1, 1), range(2, 4))
    other = run(tmp_path / "step-2", family, (1, 2, 2), range(2, 4), tmp_path / "step-4")
    straight = run(folders[family], family, (2, 1, 1), range(4))
    assert first + same == straight, "the same shape goes on bit for bit"
    assert first + other == pytest.approx(wanted, rel=1e-5)
    check_opens(tmp_path / "step-2", family)
    opened = check_opens(tmp_path / "step-4", family)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(opened.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)


def check_opens(folder: Path, family: str) -> Any:
    """Open a checkpoint by its model's library; nothing may be missing or new."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(model_of(family))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in folder.glob("*.safetensors")}
    assert all(file.stat().st_size < 9000 for file in folder.glob("*.safetensors"))
    return model


def test_types_are_converted_as_the_model_is_made(folders: dict[str, Path], tmp_path: Path) -> None:
    half = model_of("Llama", LAYERS).bfloat16()
    half.save_pretrained(tmp_path)
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(empty("Llama"), 2)
        actors = place(cuts, (2, 1, 1), cg.pretrained(tmp_path))
        found = dict(actors[0].local.part.model.named_parameters())
    for name, parameter in found.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, half.get_parameter(name).float())


def test_a_base_model_without_its_name_in_front(tmp_path: Path) -> None:
    """As many folders have it: `h.0.attn...`, where the model has `transformer.h.0.attn...`."""
    model = model_of("GPT2", LAYERS)
    model.transformer.save_pretrained(tmp_path)
    weights = cg.pretrained(tmp_path)
    weights.check(empty("GPT2"))
    with use_world(VirtualWorld(2)):
        actors = place(cg.cut_layers(empty("GPT2"), 2), (2, 1, 1), weights)
        last = actors[1].local.part.model
        assert torch.equal(last.transformer.ln_f.weight, model.transformer.ln_f.weight)


# -- what is wrong ------------------------------------------------------------------------------


def changed(folder: Path, to: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a folder with other tensors, or without some."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    found = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, to / "model.safetensors", {"format": "pt"})
    return to


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {NORM: None},
            r"lacks tensors that LlamaForCausalLM has: 'model.norm.weight'; it has 'lm_",
        ),
        (
            {"model.extra": torch.zeros(2)},
            "has tensors that LlamaForCausalLM has not: 'model.extra'",
        ),
        ({NORM: torch.zeros(3)}, r"'model.norm.weight' is \[3\] in .*, and \[16\] in the model"),
        ({NORM: torch.zeros(16, dtype=torch.int8)}, "is torch.int8 in .*, and torch.float32 here"),
        (
            {NORM: torch.zeros(16, dtype=torch.float8_e4m3fn)},
            "e4m3fn in .* here; a quantized model",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tensors: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = cg.pretrained(changed(folders["Llama"], tmp_path, **tensors))
    with pytest.raises(ValueError, match=message):
        weights.check(empty("Llama"))


def test_an_actor_whose_tensors_the_folder_lacks(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = cg.pretrained(changed(folders["Llama"], tmp_path, **{NORM: None}))
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(empty("Llama"), 2)
        with pytest.raises(
            ValueError, match=r"lacks tensors that trainedpart\d+ has: .model.norm.weight'"
        ):
            place(cuts, (2, 1, 1), weights)


def test_folders_that_are_no_model(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing is no folder, so no model can be read"):
        cg.pretrained(tmp_path / "missing")
    with pytest.raises(
        FileNotFoundError, match=r"has neither model.safetensors nor model.safetens"
    ):
        cg.pretrained(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"it has .model.gguf., which are of other formats"):
        cg.pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.touch()
    with pytest.raises(ValueError, match=r"pytorch_model.bin is damaged, or of torch before 1.6"):
        cg.pretrained(tmp_path)
    torch.save({"state": [torch.zeros(2)]}, file)
    with pytest.raises(ValueError, match=r"pytorch_model.bin holds something else than tensors"):
        cg.pretrained(tmp_path)
    short = tmp_path / "short"
    shutil.copytree(folders["Llama"], short)
    whole = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged, or no safetensors file: "):
        cg.pretrained(short)


def test_an_index_that_does_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["GPT2"], tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    kept = json.loads(index.read_text())
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        cg.pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": kept["weight_map"] | {"x": "no.safetensors"}}))
    with pytest.raises(ValueError, match=r"names no.safetensors, which is not in"):
        cg.pretrained(tmp_path)
    file = next(iter(kept["weight_map"].values()))
    index.write_text(json.dumps({"weight_map": kept["weight_map"] | {"x": file}}))
    with pytest.raises(ValueError, match=r"says that 'x' is in .*, which has it not"):
        cg.pretrained(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        cg.pretrained(tmp_path)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_folder_that_has_the_head_of_a_tied_pair(stages: int, tmp_path: Path) -> None:
    model = model_of("Gemma", LAYERS)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    weights = cg.pretrained(tmp_path)
    cuts = cg.cut_layers(empty("Gemma"), stages)
    with use_world(VirtualWorld(stages)):
        weights.check(cuts.model)
        actors = place(cuts, (stages, 1, 1), weights)
        embedding = actors[0].local.part.model.get_input_embeddings()
        assert torch.equal(embedding.weight, model.get_input_embeddings().weight)
        cg.save_checkpoint(tmp_path / "saved", actors, like=tmp_path)
        again = place(cuts, (stages, 1, 1), weights)
        again[0].local.part.model.get_input_embeddings().weight.data.zero_()
        cg.load_checkpoint(tmp_path / "saved", again)
    embedding = again[0].local.part.model.get_input_embeddings()
    assert torch.equal(embedding.weight, model.get_input_embeddings().weight)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == tensors.keys()


def test_a_tied_parameter_that_an_actor_has_under_its_other_name(tmp_path: Path) -> None:
    """Outside of a model of transformers only the whole model knows the names of a tensor."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.tokens.weight

    save_file({"head.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    weights = cg.pretrained(tmp_path)
    embedding = torch.nn.Embedding(3, 2, device="meta")
    wanted = {"tokens.weight": embedding.weight}
    with pytest.raises(ValueError, match=r"under its other name, call check\(model\)"):
        weights.tensors(embedding, wanted, "the embedding")
    weights.check(Tied())
    assert weights.tensors(embedding, wanted, "the embedding").keys() == wanted.keys()


@pytest.fixture
def saved(folders: dict[str, Path], tmp_path: Path) -> Path:
    run(folders["Llama"], "Llama", (2, 1, 1), range(1), tmp_path / "step-1")
    return tmp_path / "step-1"


def test_checkpoints_that_do_not_fit(saved: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each is named, and nothing of the actors has changed."""
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(empty("Llama"), 2)
        actors = place(cuts, (2, 1, 1), cg.pretrained(folders["Llama"]))
        before = [p.clone() for a in actors for p in a.local.parameters()]

        def refused(error: type[Exception], message: str, folder: Path = saved) -> None:
            with pytest.raises(error, match=message):
                cg.load_checkpoint(folder, actors)
            after = [p for a in actors for p in a.local.parameters()]
            assert all(map(torch.equal, after, before))
            assert not any(a.local.optimizer.state for a in actors)

        with pytest.raises(FileExistsError, match="step-1 is there already"):
            cg.save_checkpoint(saved, actors)
        refused(FileNotFoundError, "there is no checkpoint", tmp_path / "step-9")
        refused(FileNotFoundError, "No such file", folders["Llama"])
        state = saved / "training" / "state.json"
        text = state.read_text()
        state.write_text(text[: len(text) // 2])
        refused(ValueError, "state.json is damaged")
        state.write_text("{}")
        refused(ValueError, "state.json is damaged: 'trainers'")
        state.write_text(text)
        optimizers = saved / "training" / "optimizers.safetensors"
        whole = optimizers.read_bytes()
        optimizers.write_bytes(whole[:-1])
        refused(ValueError, "optimizers.safetensors is damaged")
        save_file(load(whole) | {f"{NORM}.more.exp_avg": torch.ones(16)}, optimizers)
        refused(ValueError, "has 'model.norm.weight.more.exp_avg' of an optimizer, and no optim")
        optimizers.write_bytes(whole)
        cg.load_checkpoint(saved, actors)
        assert actors[0].local.optimizer.state
        fewer = TrainedPart.on(0)(cg.cut_layers(model_of("Llama", layers=1), 1), 0)
        with pytest.raises(ValueError, match=r"no actor has, .*'model.layers.1.*another model"):
            cg.load_checkpoint(saved, [fewer])
        more = cg.cut_layers(model_of("Llama", layers=3), 2)
        with pytest.raises(KeyError, match=r"has no 'model.layers.2.*, which trainedpart\d+ has"):
            cg.load_checkpoint(saved, [TrainedPart.on(i)(more, i) for i in range(2)])


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    assert cg.newest_checkpoint(tmp_path / "none") is None
    for name in ("step-9", "step-000010", ".step-11.partial", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert cg.newest_checkpoint(tmp_path) == tmp_path / "step-000010"


@cg.actor
class Counting(torch.nn.Module):
    """It has a tensor that no folder of the model has a place for."""

    def __init__(self, cuts: Any) -> None:
        super().__init__()
        self.part = cuts.part(0)
        self.register_buffer("steps", torch.zeros(()))


@pytest.mark.parametrize("dry_run", [True, False])
def test_actors_that_cannot_be_saved(dry_run: bool, tmp_path: Path) -> None:
    save = partial(cg.save_checkpoint, tmp_path / "step-1", dry_run=dry_run)
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model_of("Llama"), 2)
        actors = [TrainedPart.on(i)(cuts, i, rate=0.1 * (i + 1)) for i in range(2)]
        with pytest.raises(ValueError, match=r"of trainedpart\d+ and trainedpart\d+ have other op"):
            save(actors)
        plain = cg.actor(torch.nn.Linear).on(0)(2, 2)
        with pytest.raises(ValueError, match=r"linear\d* has no part of a model"):
            save([plain])
        whole = cg.cut_layers(model_of("Llama"), 1)
        with pytest.raises(ValueError, match=r"'steps' of counting\d* is no tensor of the model"):
            save([Counting.on(0)(whole)])
        with pytest.raises(ValueError, match="the state of a checkpoint is JSON"):
            save([TrainedPart.on(0)(whole, 0)], state={"texts": whole})
    assert not list(tmp_path.iterdir())


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.zeros(2, dtype=torch.complex128))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(model_of("Llama"), 2)
        actors = [TrainedPart.on(i)(cuts, i) for i in range(2)]
        cg.save_checkpoint(tmp_path / "step-1", actors, dry_run=True)
        cg.save(tmp_path / "all.safetensors", {"0.": actors[0]}, dry_run=True)
        wide = cg.actor(Wide).on(0)()
        with pytest.raises(ValueError, match=r"'x' is .*, which safetensors has no name for"):
            cg.save(tmp_path / "all.safetensors", {"": wide}, dry_run=True)
    assert not list(tmp_path.iterdir())
