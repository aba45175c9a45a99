"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.support.fakes import Family
from tests.support.hub_models import SHAPE, tokenizer_of

CONTROL, NORMAL = 3, 1
PRE = {"llama": "default", "qwen2": "qwen2", "qwen3": "qwen2"}
STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a test's file says; each test changes one thing."""

    architecture: str = ""
    """Empty: the family's own."""
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More metadata, or other values of it. None leaves the key out."""
    tensors: Mapping[str, np.ndarray | None] = field(default_factory=dict[str, Any])
    """More tensors, or other values. None leaves the tensor out."""
    kind: str = "F32"
    """Number type of the matrices."""


def random_model(family: Family, vocab: int, *, tied: bool) -> Any:
    shape: dict[str, Any] = SHAPE | {"vocab_size": vocab, "tie_word_embeddings": tied}
    configs: dict[Family, Any] = {
        "llama": lambda: LlamaConfig(**shape, attention_bias=not tied),
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=32),
    }
    model: Any = AutoModelForCausalLM.from_config(configs[family]())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.1 * noise)
    return model


def paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter orders the rows of q and k of a Llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def their_name(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{STEMS[stem]}.{part}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{STEMS[rest]}.{part}"


def stored_tensors(family: Family, model: Any) -> dict[str, np.ndarray]:
    """llama.cpp's name -> values."""
    config, found = model.config, {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if family == "llama" and "q_proj" in name:
            values = paired(values, config.num_attention_heads)
        if family == "llama" and "k_proj" in name:
            values = paired(values, config.num_key_value_heads)
        found[their_name(name)] = values.float().numpy()
    return found


def metadata(family: Family, model: Any, tokenizer: Any) -> dict[str, Any]:
    config, tokens = model.config, tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {number for number, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    } | ({"attention.key_length": 32, "attention.value_length": 32} if family == "qwen3" else {})
    return {f"{family}.{key}": value for key, value in own.items()} | {
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE[family],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if n in special else NORMAL for n in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
        **({} if tokenizer.bos_token_id is None else {"tokenizer.ggml.bos_token_id": tokenizer.bos_token_id}),
    }


def add_key(writer: Any, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def write_gguf(path: Path, family: Family, *, tied: bool = True, written: Written | None = None) -> tuple[Any, Any]:
    """The file, and the model and tokenizer that are in it."""
    gguf: Any = import_module("gguf")
    written = written or Written()
    tokenizer = tokenizer_of(family)
    model = random_model(family, len(tokenizer), tied=tied)
    writer = gguf.GGUFWriter(str(path), written.architecture or family)
    for key, value in (metadata(family, model, tokenizer) | dict(written.keys)).items():
        if value is not None:
            add_key(writer, key, value)
    for name, values in (stored_tensors(family, model) | dict(written.tensors)).items():
        if values is None:
            continue
        kind = gguf.GGMLQuantizationType[written.kind if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer
