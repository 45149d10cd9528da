"""What a model that pools is asked for together, how its folder is read, and how texts are cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ...mpi.jobs import ROOT
from ...sampling import examples

sys.path.insert(0, str(ROOT / "examples"))

from examples.serve.front.text import HuggingFace
from examples.serve.options import refuse_for_pooling
from examples.serve.pooling.packing import PoolingScheduler, lengths, row_counts
from examples.serve.pooling.recipe import Dense, Recipe, recipe_of, task_of
from examples.serve.requests import Request

from .fake_pooling import FAILS, POOLS, FakePoolingEngine, vector_of
from .test_options import given as given_options

TEXTS = st.lists(
    st.lists(st.sampled_from([1, 2, 3, FAILS]), min_size=1, max_size=POOLS.context), max_size=40
)


@examples(80)
@given(texts=TEXTS, gone=st.sets(st.integers(0, 39)), in_flight=st.integers(1, 3))
def test_each_text_gets_its_vector_in_fair_order(
    texts: list[list[int]], gone: set[int], in_flight: int
) -> None:
    """The engine checks that batches fit; one that fails ends its own requests alone."""
    engine = FakePoolingEngine()
    scheduler = PoolingScheduler(engine, in_flight)
    for number, tokens in enumerate(texts):
        scheduler.add(Request(number, tuple(tokens), 1))
    for number in gone:
        scheduler.cancel(number)
    flying: list[Any] = []
    while not scheduler.is_idle:
        oldest = min((id_ for queue in scheduler._queues.values() for id_ in queue), default=-1)
        for ticket in scheduler.schedule():
            flying.append((ticket, engine.submit(ticket.work)))
            assert ticket.ids[0] == oldest
            oldest = min((id_ for queue in scheduler._queues.values() for id_ in queue), default=-1)
        assert len(flying) <= in_flight
        engine.run_one()
        ticket, result = flying.pop(0)
        try:
            scheduler.complete(ticket, result.vectors())
        except ValueError as error:
            scheduler.fail(ticket, str(error))
    right = dict(scheduler.vectors)
    failed = {end.id for end in scheduler.ends if end.reason == "error"}
    assert right.keys() | failed == set(range(len(texts))) - gone
    assert not right.keys() & failed
    told = {number for number in failed if texts[number][0] == FAILS}
    assert told == {n for n in set(range(len(texts))) - gone if texts[n][0] == FAILS}
    for id_, values in right.items():
        assert np.frombuffer(values, np.float32).tolist() == vector_of(texts[id_])


def test_sizes_of_batches() -> None:
    assert lengths(64) == (16, 32, 64)
    assert lengths(70) == (16, 32, 64, 70)
    assert lengths(8) == (8,)
    assert row_counts(128, 16, None) == (1, 2, 4, 8)
    assert row_counts(128, 16, 3) == (1, 2, 3)
    assert row_counts(8, 16, None) == (1,)


# -- folders ---------------------------------------------------------------------------------------


def write(folder: Path, modules: list[str], **files: Any) -> None:
    """Write the files of sentence-transformers for some modules."""
    listed = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config.json").write_text(json.dumps(files.pop("config", {})))
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file = file.parent / f"{file.name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}


def test_a_folder_says_how_values_are_pooled(tmp_path: Path) -> None:
    write(
        tmp_path,
        ["Transformer", "Pooling", "Normalize"],
        config={"matryoshka_dimensions": [8, 16]},
        **{"1_Pooling__config": MEAN, "sentence_bert_config": {"max_seq_length": 12}},
    )
    assert task_of(tmp_path) == "embed"
    recipe = recipe_of(tmp_path, "embed")
    assert recipe == Recipe("embed", "mean", (), True, 12, False, (8, 16))
    assert recipe_of(tmp_path, "embed", "cls", []).pooling == "cls"
    assert recipe_of(tmp_path, "embed", "cls", []).dimensions == ()
    later = {"pooling_mode": "lasttoken", "embedding_dimension": 4}
    write(tmp_path, ["Transformer", "Pooling"], **{"1_Pooling__config": later})
    recipe = recipe_of(tmp_path, "embed")
    assert (recipe.pooling, recipe.normalizes, recipe.dimensions) == ("last", False, None)


def test_a_dense_layer_is_read(tmp_path: Path) -> None:
    dense = {"in_features": 4, "out_features": 2, "bias": False}
    tanh = dense | {"activation_function": "torch.nn.modules.activation.Tanh"}
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    write(tmp_path, kinds, **{"1_Pooling__config": MEAN, "2_Dense__config": tanh})
    with pytest.raises(ValueError, match=r"2_Dense has no model\.safetensors: load the model with"):
        recipe_of(tmp_path, "embed")
    folder = tmp_path / "2_Dense"
    (folder / "model.safetensors").touch()
    assert recipe_of(tmp_path, "embed").dense == (Dense(folder, 4, 2, False, "tanh"),)
    other = dense | {"activation_function": "torch.nn.modules.activation.GELU"}
    write(tmp_path, kinds, **{"1_Pooling__config": MEAN, "2_Dense__config": other})
    with pytest.raises(
        ValueError, match=r"has the activation torch\.nn\.modules\.activation\.GELU"
    ):
        recipe_of(tmp_path, "embed")


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling"], MEAN | {"pooling_mode_cls_token": True}, "pools by cls and "),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (["Transformer", "Pooling"], {}, "pools by nothing: one of cls, mean, last, max is served"),
        (["Transformer", "LSTM"], MEAN, "has the module 1, LSTM, which is not served there"),
        (["Transformer", "Pooling", "Normalize", "Dense"], MEAN, "has the module 3, Dense"),
        (["Transformer"], MEAN, "has no Pooling: add one, or remove the file and give --pooling"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, kinds: list[str], pooling: Any, message: str
) -> None:
    write(tmp_path, kinds, **{"1_Pooling__config": pooling})
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path, "embed")


def test_heads_say_what_a_model_is_for(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for name, task in {
        "BertModel": "embed",
        "BertForMaskedLM": "embed",
        "BertForSequenceClassification": "score",
        "Qwen3ForCausalLM": "generate",
    }.items():
        file.write_text(json.dumps({"architectures": [name]}))
        assert task_of(tmp_path) == task
        assert task_of(tmp_path, "embed") == "embed"
    assert task_of(Path("random")) == "generate"
    with pytest.raises(FileNotFoundError, match="--task embed needs a folder of transformers"):
        recipe_of(Path("random"), "embed")


def test_scores_are_activated_as_a_folder_says(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert recipe_of(tmp_path, "score").activation == "sigmoid"
    name = "torch.nn.modules.linear.Identity"
    for config in (
        {"sentence_transformers": {"activation_fn": name}},
        {"sbert_ce_default_activation_function": name},
    ):
        file.write_text(json.dumps(config))
        assert recipe_of(tmp_path, "score").activation == "identity"
    with pytest.raises(ValueError, match="--pooling and --dimensions are for vectors"):
        recipe_of(tmp_path, "score", "mean")


def test_options_of_other_models_are_refused() -> None:
    refuse_for_pooling(given_options("--batch", "4", "--context", "32"))
    for words in (["--blocks", "5"], ["--draft", "ngram"], ["--lora", "a=b"], ["--chunk", "3"]):
        with pytest.raises(ValueError, match=f"{words[0]} is for models that draw tokens"):
            refuse_for_pooling(given_options(*words))


# -- texts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[HuggingFace, PreTrainedTokenizerFast]:
    """The text side of a folder, and transformers' own tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    own.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(names)}))
    return HuggingFace(folder), own


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12).map(" ".join)


@examples(200)
@given(one=WORDS, other=WORDS, most=st.none() | st.integers(5, 30))
def test_texts_are_cut_as_transformers_cuts_them(
    tokenizers: tuple[HuggingFace, PreTrainedTokenizerFast], one: str, other: str, most: int | None
) -> None:
    text, own = tokenizers
    more: Any = {} if most is None else {"truncation": True, "max_length": most}
    assert text.encode_cut(one, True, most) == own(one, **more)["input_ids"]
    ids, second = text.encode_pair(one, other, most)
    wanted = own(one, other, **more)
    assert ids == wanted["input_ids"]
    types = [int(0 < second <= place) for place in range(len(ids))]
    assert types == wanted["token_type_ids"]
