"""Tiny random models of many architectures, each with what its class does differently from Llama switched on.

Windows are shorter than the sequences of the tests, and scales, caps and multipliers far from one.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 97
WINDOW = 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, "attention_bias": True},
    "Qwen2": {},
    "Qwen2 windowed": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma": {"head_dim": 32},
    "Gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3Text": GEMMA | {"layer_types": TWO_KINDS},
    "Granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "Cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": TWO_KINDS},
    "Phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "Phi3": {"sliding_window": WINDOW},
    "Olmo2": {},
    "Olmo3": {"sliding_window": WINDOW, "layer_types": TWO_KINDS},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
    "Starcoder2": {"sliding_window": WINDOW},
    "StableLm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}
"""Name -> what is set on top of SHAPE."""
ROUTED: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3Moe": (ROUTED | {"moe_intermediate_size": 64}, "'qwen3_moe' is not supported: it is a mixture of experts"),
    "Mixtral": (ROUTED, "'mixtral' is not supported: it is a mixture of experts"),
    "GptOss": (
        ROUTED | {"head_dim": 16},
        "'gpt_oss' is not supported: (it is a mixture of experts|its attention has sinks)",
    ),
    "Mamba": ({}, "'mamba' is not supported"),
    "GPTJ": ({}, "'gptj' is not supported: its class computes attention in a way of its own"),
    "GPTNeoX": ({}, "'gpt_neox' is not supported: .* needs a tensor 'lm_head.weight', but the model's files have none"),
    "GPT2": ({}, "'gpt2' is not supported"),
    "Bloom": ({}, "'bloom' is not supported"),
}
"""Name -> settings, and what the sentence says."""


def family(name: str) -> str:
    """`Qwen2 windowed` is a Qwen2."""
    return name.partition(" ")[0]


def architecture_model(folder: Path, name: str, settings: dict[str, Any] | None = None, **more: Any) -> Path:
    """One file of fp32 weights, spread widely enough that log-probs differ."""
    changes = SUPPORTED[name] if settings is None else settings
    config = getattr(transformers, f"{family(name)}Config")(**(SHAPE | changes | more))
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.12 * noise)
    path = folder / name.replace(" ", "-")
    model.save_pretrained(path)
    return path
