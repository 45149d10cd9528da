"""What a folder says of its model beside the weights: the task, and how a vector is made.

sentence-transformers keeps that in `modules.json` and in a folder for each module. The module does
not import torch, since the front of the server runs without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GENERATE, EMBED, SCORE = "generate", "embed", "score"
TASKS = ("auto", GENERATE, EMBED, SCORE)
"""What a model may be served for; `auto` is what its folder says."""
POOLINGS = ("cls", "mean", "last", "max")
"""The first token's values, the mean of all, the last one's, and the greatest of each."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
"""The names of sentence-transformers: of its switches, and of its later setting."""
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling.

    Attributes:
        folder: with its weights, as `linear.weight` and `linear.bias`.
        inputs, outputs: numbers of a vector.
        activation: of `ACTIVATIONS`.
    """

    folder: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class Recipe:
    """How a model's values become what clients get.

    Attributes:
        task: `EMBED` or `SCORE`.
        pooling: of `POOLINGS`; empty: as the model is, which the engine looks at, or a score.
        dense: layers behind the pooling.
        normalizes: whether a vector has the length 1.
        longest: tokens of a text at most; None: as many as the model takes.
        lowers: whether texts are in lower case.
        dimensions: to which a vector may be cut; empty: any number. None: it may not be cut.
        activation: of a score.
        has_types: whether the second text of a pair is told by its type, if the model takes types.
    """

    task: str
    pooling: str = ""
    dense: tuple[Dense, ...] = ()
    normalizes: bool = True
    longest: int | None = None
    lowers: bool = False
    dimensions: tuple[int, ...] | None = None
    activation: str = "sigmoid"
    has_types: bool = True


def task_of(folder: Path, asked: str = "auto") -> str:
    """The task that a model is served for.

    Args:
        asked: of `TASKS`.
    """
    if asked != "auto":
        return asked
    if (folder / "modules.json").exists():
        return EMBED
    names = _object(folder / "config.json").get("architectures") or [""]
    if names[0].endswith("ForSequenceClassification"):
        return SCORE
    # A vector is what is left of a model without a head, or of one whose head guesses hidden words.
    return EMBED if names[0].endswith(("Model", "ForMaskedLM", "ForPreTraining")) else GENERATE


def recipe_of(
    folder: Path, task: str, pooling: str | None = None, dimensions: list[int] | None = None
) -> Recipe:
    """The recipe of a folder.

    Args:
        task: `EMBED` or `SCORE`.
        pooling: of `POOLINGS`, if it is given by hand.
        dimensions: to which vectors may be cut, if they are given by hand; empty: any.

    Raises:
        FileNotFoundError: it holds no model of transformers.
        ValueError: the folder asks for something that is not served.
    """
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"--task {task} needs a folder of transformers: there is no {file}")
    config = _object(file)
    length = _object(folder / "sentence_bert_config.json")
    recipe = Recipe(
        task,
        longest=length.get("max_seq_length"),
        lowers=bool(length.get("do_lower_case")),
    )
    if task == SCORE:
        if pooling or dimensions is not None:
            raise ValueError(
                "--pooling and --dimensions are for vectors, and --task score has none"
            )
        return replace(recipe, activation=_activation_of_score(config, file))
    if (folder / "modules.json").exists():
        recipe = _modules(folder, recipe)
    return replace(
        recipe,
        pooling=pooling or recipe.pooling,
        dimensions=_dimensions(config) if dimensions is None else tuple(dimensions),
    )


def _modules(folder: Path, recipe: Recipe) -> Recipe:
    """The recipe with what the modules of sentence-transformers do."""
    file = folder / "modules.json"
    modules = json.loads(file.read_text(encoding="utf-8"))
    pooling, dense, normalizes = "", list[Dense](), False
    for number, module in enumerate(modules):
        kind, path = str(module.get("type", "")).rpartition(".")[2], module.get("path") or ""
        if kind == "Transformer" and number == 0:
            if path:
                raise ValueError(
                    f"{file} keeps its Transformer in {path}: move its files to {folder}, and "
                    "write an empty path there"
                )
        elif kind == "Pooling" and number == 1:
            pooling = _pooling(folder / path / "config.json")
        elif kind == "Dense" and pooling and not normalizes:
            dense.append(_dense(folder / path))
        elif kind == "Normalize" and pooling:
            normalizes = True
        else:
            raise ValueError(
                f"{file} has the module {number}, {kind}, which is not served there: a "
                "Transformer comes first, then Pooling, then any Dense, then Normalize or nothing"
            )
    if not pooling:
        raise ValueError(f"{file} has no Pooling: add one, or remove the file and give --pooling")
    return replace(recipe, pooling=pooling, dense=tuple(dense), normalizes=normalizes)


def _pooling(file: Path) -> str:
    settings = _object(file)
    names = [_MODES.get(name, name) for name, is_on in settings.items() if is_on is True]
    names = [name for name in names if name in POOLINGS or name.startswith("pooling_mode")]
    if mode := settings.get("pooling_mode"):
        listed = mode if isinstance(mode, list) else [mode]
        names = [_NAMES.get(name, name) for name in listed]
    if len(names) != 1 or names[0] not in POOLINGS:
        shown = " and ".join(map(str, names)) or "nothing"
        raise ValueError(f"{file} pools by {shown}: one of {', '.join(POOLINGS)} is served")
    return str(names[0])


def _dense(folder: Path) -> Dense:
    settings = _object(folder / "config.json")
    if not (folder / "model.safetensors").exists():
        raise ValueError(
            f"{folder} has no model.safetensors: load the model with sentence-transformers, and "
            "save it with save_pretrained"
        )
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    return Dense(
        folder,
        settings["in_features"],
        settings["out_features"],
        bool(settings.get("bias", True)),
        _activation(name, folder / "config.json"),
    )


def _activation(name: str, file: Path) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"{file} has the activation {name}: served are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _activation_of_score(config: Mapping[str, Any], file: Path) -> str:
    """What makes a score of the model's number: by default what keeps it between 0 and 1."""
    later = config.get("sentence_transformers") or {}
    name = later.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    return "sigmoid" if name is None else _activation(name, file)


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """As vLLM reads them from a configuration."""
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(listed)
    return () if config.get("is_matryoshka") else None


def _object(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty without the file."""
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is no object of JSON: {error}") from None
