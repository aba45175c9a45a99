"""A .gguf file as a model: its configuration, tokenizer and end tokens, and its tensors one after another.

    config.json             from the metadata, by the table KEYS
    tokenizer, template     by transformers' own reader of GGUF files, then corrected where the file says otherwise
    generation_config.json  the end tokens: those that the metadata names, and those that llama.cpp knows by name
    tensors                 dequantised in fp32 by the package gguf. Those that were stored in 8 bits or fewer become
                            bf16; fp32, fp16 and bf16 stay what they are

GGUF files are written for llama.cpp, which has code of its own for each architecture, so everything that a file says
about the model must be understood here. A key or a tensor that is not in the tables is refused and never skipped: a
skipped scale of the rotary angles, for example, gives a model that writes fluent nonsense. For the same reason only the
architectures are accepted whose values the tests compare.

llama.cpp's converter reorders the rows of q and k of Llama models, from two halves to pairs; `unpaired` undoes it.

Left out: files in several parts, mixtures of experts, scaled rotary positions. The package gguf is an extra, imported
only when a file is read; torch and transformers only for its values and its tokenizer, so that `doctor` may ask for
shapes without them.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ModelError

if TYPE_CHECKING:
    import torch

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
PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Tensors that are no codes."""
END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
)
"""Control tokens that end a reply even where the metadata names only one end token."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {"qwen2": CONTRACTIONS + r"|\p{N}" + REST, "llama-bpe": CONTRACTIONS + r"|\p{N}{1,3}" + REST}
"""`tokenizer.ggml.pre` -> how text is cut into words before its bytes are merged."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
TOKENIZER = "tokenizer.json"


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
    if not os.path.isfile(path):
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


def write_files(file: GGUFFile, folder: Path) -> None:
    """config.json, generation_config.json, the tokenizer and its template."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**config_of(file))
    tokenizer = write_tokenizer(file, folder)
    ends = end_ids(file, tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, ends[0]
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2))


def write_tokenizer(file: GGUFFile, folder: Path) -> Any:
    """With the file's own way to cut text into words, which transformers does not always take over."""
    from transformers import AutoTokenizer

    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise refusal(file.path, "it has no chat template, so it is no instruct model")
    if "bos_token" in template and "tokenizer.ggml.bos_token_id" not in file.metadata:
        raise refusal(file.path, "its template begins with a token that its metadata does not name")
    words = words_of(file)
    try:
        read_by_transformers(file).save_pretrained(folder)
        correct_tokenizer(folder / TOKENIZER, words, rows_of(file))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The same as for the file: foreign content.
    except Exception as error:
        raise refusal(file.path, f"transformers cannot read its tokenizer ({type(error).__name__}: {error})") from error
    refuse_split_tokens(file, tokenizer)
    return tokenizer


def read_by_transformers(file: GGUFFile) -> Any:
    from transformers import AutoTokenizer

    folder = file.path.absolute().parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.path.name, trust_remote_code=False)


def correct_tokenizer(path: Path, words: dict[str, Any] | None, rows: int) -> None:
    """transformers' reader adds tokens that its classes expect, also where the model has no row for them."""
    written = json.loads(path.read_text(encoding="utf-8"))
    written["added_tokens"] = [token for token in written["added_tokens"] if token["id"] < rows]
    if words is not None:
        written["pre_tokenizer"] = words
    path.write_text(json.dumps(written), encoding="utf-8")


def words_of(file: GGUFFile) -> dict[str, Any] | None:
    """How text is cut before its bytes are merged, as in tokenizer.json; None where it is not bytes that are merged."""
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    match file.metadata.get("tokenizer.ggml.pre", "default"):
        case "smollm":
            steps = [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}]
        case "qwen2" | "llama-bpe" as name:
            split = {"type": "Split", "pattern": {"Regex": WORDS[name]}, "behavior": "Isolated", "invert": False}
            steps = [split, BYTES | {"use_regex": False}]
        case "default" | "gpt-2":
            return BYTES | {"use_regex": True}
        case other:
            raise refusal(file.path, f"its tokenizer cuts text into words as '{other}' does, which is not known here")
    return {"type": "Sequence", "pretokenizers": steps}


def refuse_split_tokens(file: GGUFFile, tokenizer: Any) -> None:
    """A control token in the template must be one id, or the model sees a text that it was not trained on."""
    template = file.metadata["tokenizer.chat_template"]
    for token, number in control_tokens(tokenizer).items():
        if token in template and tokenizer(token, add_special_tokens=False)["input_ids"] != [number]:
            raise refusal(file.path, f"its tokenizer cuts '{token}' into several tokens")


def control_tokens(tokenizer: Any) -> dict[str, int]:
    return {entry.content: number for number, entry in tokenizer.added_tokens_decoder.items() if entry.special}


def end_ids(file: GGUFFile, tokenizer: Any) -> list[int]:
    """The one that the tokenizer calls its end token comes first."""
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = control_tokens(tokenizer)
    found = [*named, *(control.get(token) for token in END_TOKENS)]
    if ends := list(dict.fromkeys(number for number in found if number is not None)):
        return ends
    raise refusal(file.path, "it names no end token")


def read_tensors(file: GGUFFile, shapes: "dict[str, torch.Size]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Name and values of every tensor. shapes: of the model that they are for."""
    import torch

    refuse_shapes(file, shapes)
    for name, tensor in file.tensors.items():
        values = torch.from_numpy(package().dequantize(tensor.data, tensor.tensor_type).copy())
        if not bool(torch.isfinite(values).all()):
            raise ModelError(f"{file.path} is damaged: '{tensor.name}' has values that are not numbers; get it again.")
        if file.architecture == "llama" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            values = unpaired(values, heads_of(file, name))
        yield name, values.to(getattr(torch, PLAIN_TYPES.get(tensor.tensor_type.name, "bfloat16")))


def heads_of(file: GGUFFile, name: str) -> int:
    heads = file.metadata["llama.attention.head_count"]
    return heads if "q_proj" in name else file.metadata.get("llama.attention.head_count_kv", heads)


def unpaired(rows: "torch.Tensor", heads: int) -> "torch.Tensor":
    """[heads * size, ...]: in each head from (0, size / 2, 1, size / 2 + 1, ...) to (0, 1, 2, ...)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def refuse_shapes(file: GGUFFile, shapes: "dict[str, torch.Size]") -> None:
    found = tensor_shapes(file)
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            theirs, ours = (list(size) if size else "nothing" for size in (found.get(name), shapes.get(name)))
            raise refusal(file.path, f"for '{name}' it has {theirs} and the model needs {ours}")
