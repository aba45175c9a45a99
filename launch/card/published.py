"""The config.json of a model: from its files if they are on this machine, else as it was published.

    shape     layers, hidden size, heads, vocabulary and whether the head is tied: all that a plan for a card needs

The table has the models of the presets and their relatives, so that a plan can be made before gigabytes are fetched. No
network is used. A model with the same name and another shape would have another plan, so files come first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.plan.shape import kind_of
from shared.base.gguf import config_of, open_gguf
from shared.config.model import ModelConfig, hub_cache_folder, in_hub_cache
from shared.embedded import EMBEDDED
from shared.errors import ModelError

Facts = Mapping[str, Any]


def qwen2(layers: int, hidden: int, inner: int, heads: int, key_heads: int, *, tied: bool, vocabulary: int) -> Facts:
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
    }


QWEN_05B = qwen2(24, 896, 4864, 14, 2, tied=True, vocabulary=151_936)
QWEN_15B = qwen2(28, 1536, 8960, 12, 2, tied=True, vocabulary=151_936)
QWEN_3B = qwen2(36, 2048, 11_008, 16, 2, tied=True, vocabulary=151_936)
QWEN_7B = qwen2(28, 3584, 18_944, 28, 4, tied=False, vocabulary=152_064)
R1_DISTILL_15B = {**QWEN_15B, "tie_word_embeddings": False, "max_position_embeddings": 131_072}
R1_DISTILL_7B = {**QWEN_7B, "max_position_embeddings": 131_072}
BY_SIZE = {"0.5B": QWEN_05B, "1.5B": QWEN_15B, "3B": QWEN_3B, "7B": QWEN_7B}
PUBLISHED: Mapping[str, Facts] = {
    **{f"Qwen/Qwen2.5-{size}{kind}": facts for size, facts in BY_SIZE.items() for kind in ("", "-Instruct")},
    **{f"Qwen/Qwen2.5-Coder-{size}{kind}": facts for size, facts in BY_SIZE.items() for kind in ("", "-Instruct")},
    **{f"Qwen/Qwen2.5-Math-{size}{kind}": BY_SIZE[size] for size in ("1.5B", "7B") for kind in ("", "-Instruct")},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": R1_DISTILL_15B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": R1_DISTILL_7B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
    },
}
"""By hub id."""


NEEDED = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def facts_of(model: ModelConfig) -> Facts:
    """ModelError if neither its files nor the table know it."""
    kind = kind_of(model)
    if kind == "gguf":
        return config_of(open_gguf(Path(model.path)))
    folder = in_hub_cache(model, hub_cache_folder()) if kind == "hub" else EMBEDDED.get(model.path, Path(model.path))
    file = folder / "config.json"
    if file.is_file():
        return read(file)
    if model.path in PUBLISHED:
        return PUBLISHED[model.path]
    raise ModelError(
        f"'{model.path}' is not on this machine, and its shape is not known here; fetch it first: hf download"
        f" {model.path} config.json, or give a local folder as model.path."
    )


def read(file: Path) -> Facts:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        missing = [key for key in NEEDED if key not in facts]
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file} is not a model's configuration ({error}); check model.path.") from error
    if missing:
        raise ModelError(f"{file} has no '{missing[0]}'; check model.path.")
    return facts
