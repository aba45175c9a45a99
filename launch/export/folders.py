"""The three kinds of folder that `export` writes, all but the card.

peft        adapter_model.safetensors, adapter_config.json, tokenizer and template
merged      the whole model as the hub holds it: weights, config.json, generation_config.json, tokenizer, template
gguf-ready  merged, with config.json also in the spelling that converters of llama.cpp before transformers 5 read
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from launch.export.weights import Deltas, merged_weights, write_weights
from learner.durable.checkpoint import Checkpoint
from learner.state import ADAPTER
from shared.config.tree import Config
from shared.embedded import EMBEDDED_DIR
from shared.model.adapter_file import adapter_config
from shared.model.base_cache import DIGESTS, WEIGHTS

Form = Literal["peft", "merged", "gguf-ready"]
ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"


def write_peft(out: Path, config: Config, checkpoint: Checkpoint, base: Path) -> None:
    """What PEFT, vLLM and transformers load beside the base."""
    (out / ADAPTER).write_bytes(checkpoint.files[ADAPTER])
    named: dict[str, Any] = json.loads(adapter_config(config.lora, base_name(config)))
    if not is_folder(config):
        named["revision"] = config.model.revision
    (out / ADAPTER_CONFIG).write_text(json.dumps(named, indent=2, sort_keys=True))
    copy_but(base, out, {CONFIG, GENERATION})


def write_merged(out: Path, config: Config, checkpoint: Checkpoint, base: Path, dtype: torch.dtype, form: Form) -> None:
    """A checkpoint of its own."""
    deltas = Deltas(checkpoint.files[ADAPTER], config.lora.alpha / config.lora.rank)
    write_weights(out, merged_weights(base, deltas, dtype))
    model: dict[str, Any] = json.loads((base / CONFIG).read_text())
    model.pop("quantization_config", None)
    model.pop("torch_dtype", None)
    model["dtype"] = str(dtype).removeprefix("torch.")
    if form == "gguf-ready":
        model |= older_spelling(model)
    (out / CONFIG).write_text(json.dumps(model, indent=2))
    copy_but(base, out, {CONFIG})


def older_spelling(model: dict[str, Any]) -> dict[str, Any]:
    """Where the base of the rotary angles stood before `rope_parameters`; a converter that looks there and finds
    nothing takes 10000 and makes a model that talks nonsense."""
    rope: dict[str, Any] = model.get("rope_parameters") or {}
    found: dict[str, Any] = {"torch_dtype": model["dtype"]}
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return found


def copy_but(base: Path, out: Path, left_out: set[str]) -> None:
    """Tokenizer, template and the like, as the checkpoint has them."""
    for file in sorted(base.iterdir()):
        if file.is_file() and file.name not in {WEIGHTS, DIGESTS} | left_out:
            shutil.copy(file, out / file.name)


def is_folder(config: Config) -> bool:
    """Whether the base lies here; otherwise it has a name on the hub."""
    return config.model.path == "embedded" or Path(config.model.path).is_dir()


def base_name(config: Config) -> str:
    """What others find the base by."""
    if config.model.path == "embedded":
        return str(EMBEDDED_DIR)
    return str(Path(config.model.path).resolve()) if is_folder(config) else config.model.path
