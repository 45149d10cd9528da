"""Folders of models whose names and shapes differ from the modules', against `from_pretrained`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.layout import Region, whole
from cg.launch.checkpoints.held import held
from cg.launch.checkpoints.stored_tensor import ReadBox
from cg.launch.checkpoints.tensor_files import TensorFile
from cg.launch.world.world import use_world
from cg.tracer.values.actor_state import collect

from .families import model_of, transformers
from .library_models import CASES, FEW, empty_library_model, library_model
from .training import TrainedPart

core_model_loading = pytest.importorskip("transformers.core_model_loading")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
pytestmark = pytest.mark.timeout(300)

EXPERTS = cg.plan({"*.gate_up_proj": cg.cut(1, "tp", blocks=2), "*.down_proj": cg.cut(2, "tp")})
"""Cuts of merged experts, through both of the tensors that are joined in each."""
DENSE = cg.plan({"*.self_attention.dense.weight": cg.cut(1, "tp")})
"""The cut of models without a plan or experts."""


def empty(case: str) -> Any:
    with cg.empty_weights():
        return empty_library_model(case)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def place(model: Any, stages: int, tp: int, weights: Any) -> list[Any]:
    """An actor for each stage of a model, on a rank or on ranks that cut its tensors."""
    layers = "model.language_model.layers" if hasattr(model.config, "vision_config") else None
    cuts = cg.cut_layers(model, stages, layers=layers)
    if tp == 1:
        return [TrainedPart.on(i, init=weights)(cuts, i) for i in range(stages)]
    if hasattr(model.config, "num_experts_per_tok"):
        plan = EXPERTS  # that of the model leaves experts whole
    else:
        try:
            plan = cg.plans.hf(model, batch=None)
        except ValueError:  # nothing of it can be cut by a derived plan
            plan = DENSE
    meshes = (cg.mesh(range(tp * i, tp * (i + 1)), tp=tp) for i in range(stages))
    return [TrainedPart.on(m, plan=plan, init=weights)(cuts, i) for i, m in enumerate(meshes)]


def compare(actors: list[Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare what each rank holds, bit for bit."""
    seen = set()
    for actor in actors:
        for rank, instance in actor.instances.items():
            states = {id(state.tensor): state for state in collect(instance).tensors}
            for name, tensor in instance.part.model.state_dict(keep_vars=True).items():
                _, region = held(states[id(tensor)], actor._member.group, rank)
                assert torch.equal(tensor, piece_of(expected[name], region)), name
                seen.add(name)
    assert expected.keys() - seen <= {"lm_head.weight"}, "a head that is its embedding"


def piece_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, runs in enumerate(region):
        tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in runs], dim)
    return tensor


def reopened(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of a folder; nothing may be missing or new."""
    opened, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return opened.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.slow) for c in CASES]
)
def test_a_folder_is_read_and_written_as_transformers_does(case: str, tmp_path: Path) -> None:
    model = library_model(case)
    model.save_pretrained(tmp_path / "0", max_shard_size="20KB")
    expected = reopened(model, tmp_path / "0")
    newest = tmp_path / "0"
    for number, (stages, tp) in enumerate(((1, 1), (2, 1), (1, 2)), 1):
        with use_world(VirtualWorld(stages * tp)):
            weights = cg.pretrained(newest)
            weights.check(empty(case))
            actors = place(empty(case), stages, tp, weights)
            compare(actors, expected)
            newest = tmp_path / str(number)
            cg.save_checkpoint(newest, actors, like=tmp_path / "0", largest=20_000)
            for instance in (i for actor in actors for i in actor.instances.values()):
                for parameter in instance.parameters():
                    parameter.data.zero_()
            cg.load_checkpoint(newest, actors)
            compare(actors, expected)
        again = reopened(model, newest)
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
        first, last = stored(tmp_path / "0"), stored(newest)
        assert first.keys() == last.keys(), "the names are those of the folder"
        assert all(torch.equal(last[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", ["Mixtral", pytest.param("GPTNeoX", marks=pytest.mark.slow)])
def test_files_of_torch_save(case: str, sharded: bool, tmp_path: Path) -> None:
    """They are read as safetensors are, and written as safetensors with the same names."""
    model = library_model(case)
    model.save_pretrained(tmp_path / "safe")
    tensors = stored(tmp_path / "safe")
    folder = tmp_path / "bin"
    model.config.save_pretrained(folder)
    files = {name: f"pytorch_model-{sharded and n % 2}.bin" for n, name in enumerate(tensors)}
    if not sharded:
        files = dict.fromkeys(tensors, "pytorch_model.bin")
    for file in set(files.values()):
        torch.save({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    if sharded:
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": files}))
    weights = cg.pretrained(folder)
    weights.check(empty(case))
    with use_world(VirtualWorld(2)):
        actors = place(empty(case), 2, 1, weights)
        compare(actors, model.state_dict())
        cg.save_checkpoint(tmp_path / "saved", actors, like=folder)
    assert stored(tmp_path / "saved").keys() == tensors.keys()
    again = reopened(model, tmp_path / "saved")
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_rank_reads_its_own_experts_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library_model("Mixtral")
    model.save_pretrained(tmp_path)
    read: dict[str, list[tuple[int, ...]]] = {}
    opened = TensorFile.opened

    @contextmanager
    def watched(file: TensorFile) -> Iterator[ReadBox]:
        with opened(file) as read_box:

            def watch(name: str, box: tuple[slice, ...]) -> torch.Tensor:
                tensor = read_box(name, box)
                read.setdefault(name, []).append(tuple(tensor.shape))
                return tensor

            yield watch

    monkeypatch.setattr(TensorFile, "opened", watched)
    with use_world(VirtualWorld(4)):
        actors = place(empty("Mixtral"), 2, 2, cg.pretrained(tmp_path))
    expert = "model.layers.1.block_sparse_moe.experts.3"
    assert read[f"{expert}.w1.weight"] == [(12, 16), (12, 16)], "each of two ranks its rows"
    assert read[f"{expert}.w2.weight"] == [(16, 12), (16, 12)], "and its columns"
    read.clear()
    with use_world(VirtualWorld(2)):
        cuts = cg.cut_layers(empty("Mixtral"), 2)
        TrainedPart.on(0, init=cg.pretrained(tmp_path))(cuts, 0)
    assert not [name for name in read if name.startswith("model.layers.1.")]
    assert len(actors) == 2


def test_names_of_older_folders(tmp_path: Path) -> None:
    """Names that are older than the model's classes, and tables that the model computes."""
    model = model_of("Bert")
    model.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    weights = cg.pretrained(tmp_path)
    with cg.empty_weights():
        cuts = cg.cut_layers(model_of("Bert"), 1)
    weights.check(cuts.model)
    layers = model.config.num_hidden_layers
    assert repr(weights) == f"the weights in {tmp_path}, {4 * layers + 4} under other names"
    with use_world(VirtualWorld(1)):
        part = TrainedPart.on(0, init=weights)(cuts, 0)
        compare([part], model.state_dict())
        cg.save_checkpoint(tmp_path / "saved", [part], like=tmp_path)
    assert stored(tmp_path / "saved").keys() == tensors.keys() - {"bert.embeddings.position_ids"}


def test_a_model_without_its_head_from_a_folder_with_it(tmp_path: Path) -> None:
    """A prefix that the folder has, and the model has not; the head is then a tensor too many."""
    model = model_of("Llama")
    model.save_pretrained(tmp_path)
    base = transformers.LlamaModel(model.config)
    weights = cg.pretrained(tmp_path)
    state = base.state_dict(keep_vars=True)
    sources = weights.tensors(base, state, "the base model")
    for name, tensor in model.model.state_dict().items():
        shape = tuple(tensor.shape)
        assert torch.equal(sources[name].read(whole(shape), tensor.dtype), tensor)
    with pytest.raises(ValueError, match=r"has tensors that LlamaModel has not: 'lm_head.weight'"):
        weights.check(base)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = library_model("Mixtral")
    model.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        (
            {n: t for n, t in tensors.items() if n != expert},
            r"layers.0.mlp.experts.down_proj' is \[3, 16, 24\] in .*, and \[4, 16, 24\] in the",
        ),
        (
            {n: t for n, t in tensors.items() if "layers.0.block_sparse_moe.experts" not in n},
            "lacks tensors that MixtralForCausalLM has: 'model.layers.0.mlp.experts.down_proj', '",
        ),
        (
            tensors | {expert: tensors[expert].to(torch.float8_e4m3fn)},
            f"'{expert}' is torch.float8_e4m3fn in .* here; a quantized model",
        ),
        (
            tensors | {expert: tensors[expert][:, :-1].contiguous()},
            r"experts.0.w2.weight' by MergeModulelist of .* \[1, 16, 23\] and \[1, 16, 24\] are",
        ),
    ]
    for changed, message in cases:
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            cg.pretrained(tmp_path).check(empty("Mixtral"))


def test_converters_that_cut_and_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the folder becomes several, is transposed, or has its rows in another order."""
    rules = [
        ("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "Chunk", {"dim": 0}),
        ("o_turned", ["o_proj.weight"], "Transpose", {}),
        ("q_pairs", ["q_proj.weight"], "Interleave", {"dim": 0}),
        ("k_pairs", ["k_proj.weight"], "PermuteForRope", {}),
    ]
    mapping = [
        core_model_loading.WeightConverter(a, b, [getattr(core_model_loading, kind)(**options)])
        for a, b, kind, options in rules
    ]
    monkeypatch.setattr(
        conversion_mapping, "get_model_conversion_mapping", lambda _: copy.deepcopy(mapping)
    )
    model = library_model("Llama")
    model._weight_conversions = copy.deepcopy(mapping)  # as saving reverses them
    model.save_pretrained(tmp_path / "0")
    tensors = stored(tmp_path / "0")
    assert tensors["model.layers.0.mlp.gate_up.weight"].shape == (48, 16)
    newest = tmp_path / "0"
    for number, (stages, tp) in enumerate(((2, 1), (1, 2)), 1):
        with use_world(VirtualWorld(2)):
            actors = place(empty("Llama"), stages, tp, cg.pretrained(newest))
            compare(actors, model.state_dict())
            newest = tmp_path / str(number)
            cg.save_checkpoint(newest, actors, like=tmp_path / "0")
        saved = stored(newest)
        assert saved.keys() == tensors.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


class Scaled(core_model_loading.ConversionOps):
    """A conversion that computes, as those do that undo a quantization."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {name: tensors[0] * 2 for name, tensors in input_dict.items()}


def test_a_conversion_that_computes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library_model("Llama")
    model.save_pretrained(tmp_path)
    converter = core_model_loading.WeightConverter("q_proj.weight", "q_proj.weight", [Scaled()])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    message = "q_proj.weight' by Scaled of transformers, which cg cannot follow: it calls aten.mul"
    with pytest.raises(ValueError, match=message):
        cg.pretrained(tmp_path).check(empty("Llama"))
