"""What a .gguf file says: metadata, and names and shapes of its tensors. Without torch, so that `doctor` may ask too.

    config            from the metadata, by the table KEYS
    tensors           by the tables OUTSIDE and LAYER

GGUF files are written for llama.cpp, which has code of its own for each architecture, so everything that a file says
about the model must be understood here. A key or a tensor that is not in the tables is refused and never skipped: a
skipped scale of the rotary angles, for example, gives a model that writes fluent nonsense. For the same reason only the
architectures are accepted whose values the tests compare.

Left out: files in several parts, mixtures of experts, scaled rotary positions. The package gguf is an extra, imported
only when a file is read.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.errors import ModelError

SUFFIX = ".gguf"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Name in the metadata, which is also transformers' model type -> class."""
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Metadata of the architecture -> transformers' configuration."""
SAID_TWICE = {
    "vocab_size": "vocab_size",
    "rope.dimension_count": "head_dim",
    "attention.value_length": "head_dim",
}
"""Metadata that must agree with what follows from the rest."""
NEUTRAL: dict[str, Any] = {"rope.scaling.type": "none", "attention.causal": True, "expert_count": 0}
"""Metadata that is accepted with this value only."""
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A file that this module understands."""

    path: Path
    """Where it is."""
    architecture: str
    """One of ARCHITECTURES."""
    metadata: dict[str, Any]
    """All keys but long arrays."""
    tensors: dict[str, Any]
    """transformers' name -> the package's record of the tensor."""


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(SUFFIX)


def open_gguf(path: Path) -> GGUFFile:
    """Reads the metadata and the list of tensors, and refuses what is not understood."""
    if not path.is_file():
        raise ModelError(f"model.path = '{path}' is not a file; check the name.")
    reader = read(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise refusal(path, f"its architecture is '{architecture}', and only {', '.join(ARCHITECTURES)} can be read")
    if metadata.get("split.count", 1) > 1:
        raise refusal(path, f"it is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    refuse_keys(path, architecture, metadata)
    known = tensor_names(metadata[f"{architecture}.block_count"])
    for tensor in reader.tensors:
        if tensor.name not in known:
            raise refusal(path, f"it has a tensor '{tensor.name}', which is not read here")
    tensors = {known[tensor.name]: tensor for tensor in reader.tensors}
    return GGUFFile(path=path, architecture=architecture, metadata=metadata, tensors=tensors)


def refusal(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} cannot be used: {reason}; use the model's folder in Hugging Face format instead.")


def read(path: Path) -> Any:
    try:
        return package().GGUFReader(path)
    except ModelError:
        raise
    # Its reader walks over foreign bytes and may raise anything.
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as GGUF ({type(error).__name__}: {error}); it is damaged, cut short, or another"
            " kind of file: get it again."
        ) from error


def package() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ModelError(
            "model.path is a .gguf file, and the package gguf, which reads it, is not installed here; install the extra"
            ' `gguf` (.venv/bin/python -m pip install -e ".[gguf]"), or use a folder in Hugging Face format.'
        ) from error


def refuse_keys(path: Path, architecture: str, metadata: dict[str, Any]) -> None:
    """Every key of the architecture must be in one of the tables, and the necessary ones must be there."""
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    for key, value in own.items():
        if key not in KEYS | SAID_TWICE and (key not in NEUTRAL or value != NEUTRAL[key]):
            raise refusal(path, f"it sets {prefix}{key} = {value}, which is not computed here")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        if key not in own:
            raise refusal(path, f"its metadata has no {prefix}{key}")


def tensor_names(layers: int) -> dict[str, str]:
    """llama.cpp's names -> transformers'."""
    stems = OUTSIDE | {
        f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}"
        for layer in range(layers)
        for theirs, ours in LAYER.items()
    }
    return {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in stems.items() for part in ("weight", "bias")}


def config_of(file: GGUFFile) -> dict[str, Any]:
    """As in config.json."""
    prefix = f"{file.architecture}."
    said = {name: file.metadata[prefix + key] for key, name in KEYS.items() if prefix + key in file.metadata}
    said.setdefault("num_key_value_heads", said["num_attention_heads"])
    said.setdefault("head_dim", said["hidden_size"] // said["num_attention_heads"])
    rope = {"rope_type": "default", "rope_theta": said.pop("rope_theta", 10000.0)}
    said["vocab_size"] = rows_of(file)
    for key, name in SAID_TWICE.items():
        if (value := file.metadata.get(prefix + key, said[name])) != said[name]:
            raise refusal(file.path, f"it sets {prefix}{key} = {value}, and the rest of the file means {said[name]}")
    biased = "model.layers.0.self_attn.q_proj.bias" in file.tensors
    return said | {
        "model_type": file.architecture,
        "architectures": [ARCHITECTURES[file.architecture]],
        "rope_parameters": rope,
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        **({} if file.architecture == "qwen2" else {"attention_bias": biased}),
    }


def rows_of(file: GGUFFile) -> int:
    """Of the embedding: the size of the vocabulary."""
    embedding = file.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise refusal(file.path, "it has no tensor 'token_embd.weight'")
    return int(embedding.shape[1])


def tensor_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """transformers' name -> shape; the file has the dimensions in the other order."""
    return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in file.tensors.items()}
