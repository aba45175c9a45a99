"""The values that a base's NF4 codes stand for, as a plain checkpoint that any engine loads.

    W[i] = code[q[i]] * absmax[i / 64]    (shared/nf4.py), rounded to the checkpoint's own type

Made once from the learner's own cached codes and kept beside them, under a name that holds their digest: what is served
cannot belong to other codes. Costs the checkpoint's dense size on the disk, and a quarter byte becomes two (bf16).
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from shared.base_cache import DIGESTS, WEIGHTS, CachedBase, checked_digests, list_digests, save_tensors
from shared.cache_root import PLACE
from shared.file_lock import exclusive
from shared.files import made_whole, remove_unfinished
from shared.nf4 import PARTS, STATE_KEY, from_tensors, read_facts

CPU = torch.device("cpu")


def plain_base(base: CachedBase) -> CachedBase:
    """The folder with the plain values of this base, made now if it is not there yet; its digest is its own."""
    folder = base.folder.with_name(f"{base.folder.name}-plain-{base.digest[:16]}")
    with exclusive(folder.with_suffix(".lock"), PLACE):
        if not folder.is_dir():
            write_plain(base.folder, folder)
    return CachedBase(folder=folder, digest=checked_digests(folder)[WEIGHTS])


def write_plain(source: Path, folder: Path) -> None:
    """Whole or not at all."""
    remove_unfinished(folder)
    with made_whole(folder, PLACE) as work:
        for file in source.iterdir():
            if file.name not in (WEIGHTS, DIGESTS):
                shutil.copyfile(file, work / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("quantization_config", None)
        (work / "config.json").write_text(json.dumps(config, indent=2))
        save_tensors(plain_tensors(source / WEIGHTS), work / WEIGHTS)
        list_digests(work)


def plain_tensors(weights: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its name, codes turned into values."""
    with safe_open(weights, framework="pt") as file:
        names = set(file.keys())
        codes = {name for name in names if f"{name}.{STATE_KEY}" in names}
        scales = {f"{name}.{part}" for name in codes for part in PARTS}
        plain = {name: file.get_tensor(name) for name in sorted(names - codes - scales)}
        for name in sorted(codes):
            parts = {key: file.get_tensor(key) for key in (name, *(f"{name}.{part}" for part in PARTS))}
            dtype = getattr(torch, read_facts(parts[f"{name}.{STATE_KEY}"])["dtype"])
            plain[name] = from_tensors(name, parts, CPU).dequantize(dtype)
    return plain
