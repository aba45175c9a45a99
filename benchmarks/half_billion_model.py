"""A model with the shape of Qwen2-0.5B, its vocabulary of 151,936 and random weights, as on the hub.

The tokenizer is the embedded one with filler entries up to the head's width, so that every id the head can draw has a
text. Weights are drawn as transformers initialises them and saved in bf16, the type that the real model has.

    python -m benchmarks.half_billion_model FOLDER SEED [SIZES]      SIZES: other sizes, a JSON object
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from shared.embedded import EMBEDDED_DIR

VOCABULARY = 151_936
TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


def write_model(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> int:
    """config.json, model.safetensors and tokenizer files; returns the number of parameters."""
    torch.manual_seed(seed)
    usual: dict[str, Any] = {"max_position_embeddings": 32_768, "tie_word_embeddings": True, "dtype": "bfloat16"}
    config = Qwen2Config(**sizes, **usual)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_DIR / name, folder / name)
    (folder / "tokenizer.json").write_text(
        json.dumps(filled_up(json.loads((EMBEDDED_DIR / "tokenizer.json").read_text()), sizes["vocab_size"]))
    )
    return sum(parameter.numel() for parameter in model.parameters())


def filled_up(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """With entries that no merge makes."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    vocabulary |= {f"<{index}>": index for index in range(len(vocabulary), size)}
    return tokenizer


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1]), int(sys.argv[2]), SIZES | json.loads("".join(sys.argv[3:]) or "{}")))
