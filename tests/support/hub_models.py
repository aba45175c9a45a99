"""Models as on the hub, with random numbers: bf16 in several files with an index, a tokenizer of the kind
the family has, its chat template, several end tokens, and what is different in each family.

    qwen2   biases at q, k, v
    qwen3   norms of q and k, heads that are wider than hidden / heads, a template that closes an empty thought
    llama   rotary positions scaled as in Llama 3, a first token in the template, and the day's date
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from benchmarks.embedded.chat_tokenizer import CHAT_TEMPLATE
from tests.support.fakes import Family

TEXTS = ("Tom has 3 apples and buys 4 more. How many has he?", "3 + 4 = 7\n#### 7", "system user assistant")
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
THINKING_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
DATED_TEMPLATE = (
    "{{- bos_token }}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hub_model(folder: Path, family: Family, *, tied: bool) -> Path:
    """A folder as `snapshot_download` gives it."""
    path = folder / f"Tiny-{family}-{'tied' if tied else 'untied'}"
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(path)
    model: Any = AutoModelForCausalLM.from_config(config_of(family, len(tokenizer), tied))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.1 * noise)
    ends = [tokenizer.eos_token_id, 0 if family != "llama" else 1]
    model.generation_config.eos_token_id = ends
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    return path


def config_of(family: Family, vocab: int, tied: bool) -> Any:
    """The family's configuration at a small size."""
    shape: dict[str, Any] = SHAPE | {"vocab_size": vocab, "tie_word_embeddings": tied}
    match family:
        case "qwen2":
            return Qwen2Config(**shape)
        case "qwen3":
            wide: dict[str, Any] = shape | {"head_dim": 32}
            return Qwen3Config(**wide)
        case "llama":
            scaled: dict[str, Any] = shape | {"rope_parameters": LLAMA3_ROPE}
            return LlamaConfig(**scaled)


def tokenizer_of(family: Family) -> Any:
    """Byte-level BPE of some 300 entries."""
    learned = learn(LLAMA_SPECIALS if family == "llama" else QWEN_SPECIALS)
    if family == "llama":
        return PreTrainedTokenizerFast(
            tokenizer_object=learned,
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
            chat_template=DATED_TEMPLATE,
        )
    model = json.loads(learned.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # pyright: ignore[reportArgumentType]
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=THINKING_TEMPLATE if family == "qwen3" else CHAT_TEMPLATE,
    )


def learn(specials: tuple[str, ...]) -> Tokenizer:
    """Merges from a few texts; every byte has a token."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=304,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer
