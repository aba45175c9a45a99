"""A .gguf file as a checkpoint: config.json, tokenizer, end tokens, and its tensors one after another.

    config.json             what shared/base/gguf_file.py reads
    tokenizer, template     by transformers' own reader of GGUF files, then corrected where the file says otherwise
    generation_config.json  the end tokens: those that the metadata names, and those that llama.cpp knows by name
    tensors                 dequantised in fp32 by the package gguf. Those that were stored in 8 bits or fewer become
                            bf16; fp32, fp16 and bf16 stay what they are

llama.cpp's converter reorders the rows of q and k of Llama models, from two halves to pairs; `unpaired` undoes it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from shared.base.gguf_file import GGUFFile, config_of, package, refusal, rows_of, tensor_shapes
from shared.errors import ModelError

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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


def write_files(file: GGUFFile, folder: Path) -> None:
    """config.json, generation_config.json, the tokenizer and its template."""
    config = AutoConfig.for_model(**config_of(file))
    tokenizer = write_tokenizer(file, folder)
    ends = end_ids(file, tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, ends[0]
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2))


def write_tokenizer(file: GGUFFile, folder: Path) -> Any:
    """With the file's own way to cut text into words, which transformers does not always take over."""
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


def read_tensors(file: GGUFFile, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every tensor. shapes: of the model that they are for."""
    refuse_shapes(file, shapes)
    for name, tensor in file.tensors.items():
        values = torch.from_numpy(package().dequantize(tensor.data, tensor.tensor_type).copy())
        if not bool(torch.isfinite(values).all()):
            raise ModelError(f"{file.path} is damaged: '{tensor.name}' has values that are no numbers; get it again.")
        if file.architecture == "llama" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            values = unpaired(values, heads_of(file, name))
        yield name, values.to(PLAIN_TYPES.get(tensor.tensor_type.name, torch.bfloat16))


def heads_of(file: GGUFFile, name: str) -> int:
    heads = file.metadata["llama.attention.head_count"]
    return heads if "q_proj" in name else file.metadata.get("llama.attention.head_count_kv", heads)


def unpaired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, ...]: in each head from (0, size / 2, 1, size / 2 + 1, ...) to (0, 1, 2, ...)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def refuse_shapes(file: GGUFFile, shapes: dict[str, torch.Size]) -> None:
    found = tensor_shapes(file)
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            theirs, ours = (list(size) if size else "nothing" for size in (found.get(name), shapes.get(name)))
            raise refusal(file.path, f"for '{name}' it has {theirs} and the model needs {ours}")
