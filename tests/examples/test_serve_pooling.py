"""Vectors and scores are those of transformers, whatever shares a batch or a stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.pooling.encoders import open_encoder, pool
from examples.serve.pooling.pooling_engine import CgPoolingEngine, start_pooling
from examples.serve.pooling.recipe import Dense, Recipe
from examples.serve.pooling.work import PooledText, Texts
from examples.serve.settings import Options

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
TEXTS = [list(range(3, 3 + length)) for length in (5, 16, 9, 30)]


def config(kind: str, **more: Any) -> Any:
    """A small configuration of a type of models."""
    settings = dict(DECODER if kind in ("qwen3", "mistral", "gemma3_text") else SIZES)
    if kind == "modernbert":
        settings |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        settings |= {"local_attention": 8, "pad_token_id": 0}
    if kind == "gemma3_text":
        settings |= {"use_bidirectional_attention": True, "sliding_window": 8}
    if kind == "qwen3":
        settings |= {"pad_token_id": 0}
    return transformers.AutoConfig.for_model(kind, **settings, **more)


def write(folder: Path, kind: str, scores: bool = False, **more: Any) -> Any:
    """Write a model whose weights tell texts well apart; returns it."""
    torch.manual_seed(0)
    factory = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    model = factory.from_config(config(kind, **more)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


@contextmanager
def serving(folder: Path, recipe: Recipe, ranks: int = 1, tp: int = 1) -> Iterator[CgPoolingEngine]:
    """An engine whose ranks this process plays."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with use_world(VirtualWorld(ranks)):
            model = open_encoder(folder, recipe)
            options = Options(
                batches=(1, 4), chunks=(32,), prompt_tokens=128, first_chunk=32, tp=tp, late=True
            )
            engine = start_pooling(model, options)
            assert engine is not None
            yield engine
            engine.close()
    finally:
        torch.set_num_threads(threads)


def vectors(engine: CgPoolingEngine, texts: Sequence[PooledText]) -> Tensor:
    return torch.from_numpy(engine.submit(Texts(tuple(texts))).vectors())


def wanted(model: Any, pooling: str) -> Tensor:
    """By each text alone, and the formula of the pooling."""
    rows = []
    for ids in TEXTS:
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state
        formulas = {
            "cls": hidden[:, 0],
            "mean": hidden.mean(1),
            "last": hidden[:, -1],
            "max": hidden.amax(1),
        }
        rows.append(formulas[pooling])
    return torch.cat(rows)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "pooling", "ranks", "tp"),
    [
        ("bert", "mean", 4, 2),
        ("qwen3", "last", 2, 1),
        ("roberta", "cls", 1, 1),
        pytest.param("bert", "max", 1, 1, marks=SLOW),
        pytest.param("mpnet", "mean", 4, 2, marks=SLOW),
        pytest.param("mistral", "mean", 2, 2, marks=SLOW),
        pytest.param("xlm-roberta", "mean", 2, 1, marks=SLOW),
        pytest.param("modernbert", "mean", 4, 2, marks=SLOW),
        pytest.param("nomic_bert", "mean", 2, 2, marks=SLOW),
        pytest.param("distilbert", "mean", 2, 1, marks=SLOW),
        pytest.param("gemma3_text", "mean", 4, 2, marks=SLOW),
    ],
)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, kind: str, pooling: str, ranks: int, tp: int
) -> None:
    """Texts of several lengths share a batch, and each has the vector that it has alone."""
    model = write(tmp_path, kind)
    with serving(tmp_path, Recipe("embed", pooling), ranks, tp) as engine:
        found = vectors(engine, [PooledText(ids) for ids in TEXTS])
        assert found.shape == (4, engine.limits.width)
        assert (found - wanted(model, pooling)).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "cls"), ("qwen3", "last")])
def test_pooling_that_nobody_says_is_as_tokens_see(tmp_path: Path, kind: str, pooling: str) -> None:
    """The first token has seen all where it sees ahead, else the last has."""
    write(tmp_path, kind)
    with use_world(VirtualWorld(1)):
        model = open_encoder(tmp_path, Recipe("embed"))
        part = model.build(range(3), torch.float32, Options().ways)
    assert part.sees_ahead == (pooling == "cls")


def test_a_checkpoint_with_a_head_gives_vectors(tmp_path: Path) -> None:
    """As of Qwen3-Embedding, whose type is one of models that draw tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config("qwen3")).eval()
    model.requires_grad_(False).save_pretrained(tmp_path)
    with serving(tmp_path, Recipe("embed")) as engine:
        assert engine.graphs.pooling == "last"
        found = vectors(engine, [PooledText(ids) for ids in TEXTS])
        assert (found - wanted(model.model, "last")).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "ranks", "tp"),
    [
        ("bert", 2, 1),
        pytest.param("roberta", 4, 2, marks=SLOW),
        pytest.param("qwen3", 2, 1, marks=SLOW),
    ],
)
def test_scores_of_pairs_are_those_of_transformers(
    tmp_path: Path, kind: str, ranks: int, tp: int
) -> None:
    """BERT tells the second text by its type; others do not, and get none."""
    more = {} if kind == "qwen3" else {"type_vocab_size": 2 if kind == "bert" else 1}
    model = write(tmp_path, kind, scores=True, num_labels=1, **more)
    texts = [PooledText(ids, second) for ids, second in zip(TEXTS, (2, 9, 4, 0), strict=True)]
    with serving(tmp_path, Recipe("score"), ranks, tp) as engine:
        found = vectors(engine, texts)
        rows = []
        for text in texts:
            ids = torch.tensor([text.tokens])
            types = (torch.arange(len(text.tokens)) >= text.second)[None] & (text.second > 0)
            given = {"token_type_ids": types.long()} if kind == "bert" else {}
            rows.append(model(input_ids=ids, **given).logits.sigmoid())
        assert (found - torch.cat(rows)).abs().max() < 1e-4
        assert len(set(found.flatten().tolist())) > 1


def test_a_dense_layer_is_behind_the_pooling(tmp_path: Path) -> None:
    model = write(tmp_path, "bert")
    weight, folder = torch.randn(6, 32), tmp_path / "2_Dense"
    folder.mkdir()
    save_file({"linear.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    recipe = Recipe("embed", "mean", (Dense(folder, 32, 6, False, "tanh"),))
    with serving(tmp_path, recipe) as engine:
        found = vectors(engine, [PooledText(ids) for ids in TEXTS])
        assert (found - torch.tanh(wanted(model, "mean") @ weight.T)).abs().max() < 1e-4


def test_variants_come_when_they_are_asked_for(tmp_path: Path) -> None:
    """One text is padded to the batch that is compiled, until its own size is."""
    write(tmp_path, "bert")
    with serving(tmp_path, Recipe("embed", "mean")) as engine:
        before = vectors(engine, [PooledText(TEXTS[0])])
        assert [size.rows for size in engine.graphs.compiled] == [4]
        assert engine.due(idle=True)
        while len(engine.usable) < 2:
            engine.improve()
        assert [size.rows for size in engine.usable] == [4, 1]
        assert (vectors(engine, [PooledText(TEXTS[0])]) - before).abs().max() < 1e-5
        assert not engine.due(idle=True)


def test_work_outside_of_the_limits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    with serving(tmp_path, Recipe("embed", "mean")) as engine:
        for text, message in (
            (PooledText([]), "0 tokens of at most 32"),
            (PooledText([1] * 33), "33 tokens of at most 32"),
            (PooledText([100]), "a token is not from 0 to below 100"),
            (PooledText([1, 2], 2), "a second text at 2 of 2 tokens"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(Texts((text,)))
        with pytest.raises(ValueError, match="5 texts of at most 4"):
            engine.submit(Texts((PooledText([1]),) * 5))


def test_what_is_not_served_is_refused_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, "bert", scores=True, num_labels=3)
    with pytest.raises(ValueError, match="it tells 3 classes apart, and a score is one number"):
        open_encoder(tmp_path, Recipe("score"))
    write(tmp_path, "bert")
    with use_world(VirtualWorld(3)), pytest.raises(ValueError, match="3 ranks by 3 for each"):
        start_pooling(open_encoder(tmp_path, Recipe("embed")), Options(tp=3))
    with (
        use_world(VirtualWorld(4)),
        pytest.raises(ValueError, match="4 stages are more than the 3"),
    ):
        start_pooling(open_encoder(tmp_path, Recipe("embed")), Options())
    with (
        use_world(VirtualWorld(2)),
        pytest.raises(ValueError, match="--cp is for models that"),
    ):
        start_pooling(open_encoder(tmp_path, Recipe("embed")), Options(cp=2))
    fnet = transformers.FNetConfig(**{k: v for k, v in SIZES.items() if "heads" not in k})
    transformers.AutoModel.from_config(fnet).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"FNetModel .* is not served"):
        open_encoder(tmp_path, Recipe("embed"))


def test_positions_begin_behind_padding_in_some_models(tmp_path: Path) -> None:
    for kind, context in (("bert", 40), ("roberta", 38), ("mpnet", 38)):
        write(tmp_path / kind, kind)
        assert open_encoder(tmp_path / kind, Recipe("embed")).context == context
        assert open_encoder(tmp_path / kind, Recipe("embed", longest=12)).context == 12


def test_pooling_looks_at_no_padding() -> None:
    hidden = torch.randn(2, 5, 3)
    lengths = torch.tensor([3, 5])
    other = torch.where(torch.arange(5)[None, :, None] < lengths[:, None, None], hidden, 1e6)
    for pooling in ("cls", "mean", "last", "max"):
        assert torch.equal(pool(hidden, lengths, pooling), pool(other, lengths, pooling))
