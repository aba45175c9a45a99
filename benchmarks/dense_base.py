"""The NF4 base as a dense base in fp32: the same values without codes, for programs that do not read NF4."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shared.base.cache import cached_base
from shared.config.model import ModelConfig
from shared.model.layers.nf4 import WEIGHTS, from_tensors


def write_dense_base(model: ModelConfig, folder: Path) -> None:
    """Dequantise every linear, keep the rest."""
    base = cached_base(model)
    shutil.copytree(base.folder, folder)
    tensors = load_file(base.folder / WEIGHTS)
    packed = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dtype == torch.uint8]
    dense = {name: tensor for name, tensor in tensors.items() if not any(name.startswith(p) for p in packed)}
    for name in packed:
        dense[name] = from_tensors(name, tensors, torch.device("cpu")).dequantize(torch.float32)
    save_file(dense, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((base.folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
