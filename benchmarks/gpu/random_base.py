"""A model with the true shape of a published one and random weights, as a quantised base that is ready to load.

    python -m benchmarks.gpu.random_base SHAPE FOLDER

Each block of 64 weights is drawn from the blocks of a small matrix of normal values that was quantised, with its scale.
So a base of 3 billion weights takes seconds, without a checkpoint, a download or a quantisation. Weights are as large
as those that transformers draws for a hidden size of 1,536. The head's rows are long enough for logits with a standard
deviation of SPREAD: a model whose tokens are all equally likely would be easier to compute than a real one.

FOLDER/SHAPE is what `model.path` names: configuration, tokenizer, and a weight file of the true length with nothing in
it, which takes no room on the disk. FOLDER/cache is the `model.cache_dir` that already has its base. The tokenizer is
the embedded one with filler entries up to the true vocabulary (benchmarks/half_billion_model.py).
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.half_billion_model import TOKENIZER_FILES, filled_up
from launch.card.published import QWEN_05B, QWEN_3B, QWEN_7B, QWEN_15B, R1_DISTILL_15B, Facts, qwen2
from shared.base.architecture import empty_model, read_architecture
from shared.base.cache import (
    CACHE_DIR_KEY,
    QUANTIZATION_CONFIG,
    DenseTensor,
    base_folder,
    header,
    is_decoder_linear,
    list_digests,
)
from shared.base.meta import NESTED_BLOCK
from shared.config.model import ModelConfig
from shared.embedded import EMBEDDED_DIR
from shared.model.layers.nf4 import BLOCK, WEIGHTS, NF4Weight, quantize, read_facts
from shared.run.file_lock import exclusive
from shared.run.files import made_whole, sync_files
from shared.tensor_file import save_tensors

STD = 0.8
"""Of a matrix, times the root of the hidden size."""
SPREAD = 4.0
"""The entropy of 151,936 normal logits is then 4 nats."""
LINE = 2**23
"""Normal values, of which the rows of embedding and head are windows."""
TEMPLATE = (1024, 1024)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SHAPES: Mapping[str, Facts] = {
    "tiny": {**qwen2(2, 64, 128, 4, 2, tied=False, vocabulary=512), **ROPE},
    "qwen2.5-0.5b": {**QWEN_05B, **ROPE},
    "qwen2.5-1.5b": {**QWEN_15B, **ROPE},
    "r1-distill-1.5b": {**R1_DISTILL_15B, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen2.5-3b": {**QWEN_3B, **ROPE},
    "qwen2.5-7b": {**QWEN_7B, **ROPE},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    print(random_model(args.shape, args.folder), f"after {time.monotonic() - began:.1f} s")


def random_model(shape: str, folder: Path) -> ModelConfig:
    """The section [model] for it; its files are made if they are not there."""
    source = folder / shape
    model = ModelConfig(path=str(source), cache_dir=str(folder / "cache"))
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    with exclusive(folder / f"{shape}.lock", CACHE_DIR_KEY):
        if not source.is_dir():
            with made_whole(source) as unfinished:
                write_source(SHAPES[shape], unfinished)
        base = base_folder(source, model)
        if not base.is_dir():
            with made_whole(base, CACHE_DIR_KEY) as unfinished:
                write_base(source, unfinished)
    return model


def write_source(sizes: Mapping[str, Any], folder: Path) -> None:
    """What a model folder has, with a hole in the place of the weights."""
    AutoConfig.for_model(**sizes, dtype="bfloat16", eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_DIR / name, folder / name)
    tokenizer = json.loads((EMBEDDED_DIR / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(filled_up(tokenizer, sizes["vocab_size"])))
    plan = [
        DenseTensor(name=name, shape=value.shape, dtype=torch.bfloat16, is_nf4=False, is_as_stored=True)
        for name, value in parameters_of(folder).items()
    ]
    head = header(plan)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(2 * tensor.shape.numel() for tensor in plan))
    sync_files(folder)


def write_base(source: Path, folder: Path) -> None:
    """As shared/base/cache.py writes it."""
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": QUANTIZATION_CONFIG}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    std = STD / config["hidden_size"] ** 0.5
    save_tensors(dict(random_tensors(parameters_of(source), std, seed=0)), folder / WEIGHTS)
    list_digests(folder)


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    """By name, without values; tied ones once."""
    return dict(empty_model(read_architecture(folder)).named_parameters())


def random_tensors(parameters: Mapping[str, torch.Tensor], std: float, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the file of a base."""
    rng = np.random.default_rng(seed)
    template = quantize(normal(rng, torch.Size(TEMPLATE), std))
    for name, parameter in parameters.items():
        if is_decoder_linear(name, parameter):
            yield from random_codes(parameter.shape, template, rng).tensors(name).items()
        elif parameter.dim() > 1:
            yield name, windows(rng, parameter.shape, SPREAD / parameter.shape[1] ** 0.5)
        elif name.endswith("norm.weight"):
            yield name, torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            yield name, normal(rng, parameter.shape, std)


def random_codes(shape: torch.Size, template: NF4Weight, rng: np.random.Generator) -> NF4Weight:
    """[out, in] of the template's blocks."""
    count = shape.numel() // BLOCK
    drawn = torch.from_numpy(rng.integers(0, len(template.absmax), count))
    facts = read_facts(template.facts) | {"shape": list(shape)}
    return NF4Weight(
        packed=template.packed.view(-1, BLOCK // 2)[drawn].view(-1, 1),
        absmax=template.absmax[drawn],
        quant_map=template.quant_map.clone(),
        nested_absmax=repeated(template.nested_absmax, -(-count // NESTED_BLOCK)),
        nested_quant_map=template.nested_quant_map.clone(),
        facts=torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
    )


def repeated(values: torch.Tensor, count: int) -> torch.Tensor:
    """As many of them as are asked for, from the start again where they end."""
    return values.repeat(-(-count // len(values)))[:count].clone()


def windows(rng: np.random.Generator, shape: torch.Size, std: float) -> torch.Tensor:
    """[rows, columns] normal values in bf16; each row begins elsewhere in one line of them, so that few are drawn."""
    rows, columns = shape
    starts = torch.from_numpy(rng.choice(LINE, rows, replace=False))
    return normal(rng, torch.Size([LINE + columns]), std).unfold(0, columns, 1)[starts]


def normal(rng: np.random.Generator, shape: torch.Size, std: float) -> torch.Tensor:
    """bf16 values."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32)).mul_(std).bfloat16()


if __name__ == "__main__":
    main()
