"""Convert a model once and keep the result, so that every process loads identical bits.

A cached base is a folder in Hugging Face format: config.json (with the quantisation), one model.safetensors, tokenizer
files, and DIGESTS.json with the sha256 of each file at the time of writing. Every start hashes all files again: bits
that changed on the disk are the same for actor and learner, so a comparison of the two would find nothing. The digest
of a base is that of its weight file as read now, and the handshake compares it. The cache key covers the source's files
and the quantisation, and a lock ensures a single writer.

A .gguf file is a source too (shared/base/gguf.py). Its configuration and tokenizer are written once into a folder of
the cache, its tensors are quantised straight from the file. Both have the sha256 of the file in their keys.

`dense_base` writes the values of a base without codes, as a model of one number type, which any engine loads:

    W[i] = code[q[i]] * absmax[i / 64]    (shared/model/layers/nf4.py), rounded to the type; others are converted

It is made once, beside the cached base, under a name with that base's digest, so it cannot belong to other codes.
Learner, actors, `eval`, `generate` and `chat` map its weight file: all processes share the pages, and none has a copy
of its own. `export` reads the codes, one tensor after another. The file takes two bytes per weight in bf16, four in
fp32. Tensors are converted and written one after another, which needs the memory of the largest one only. Weights with
the same input are neighbours in the file, so that a token step multiplies by them at once
(actor/engines/token_step/stacks.py).

Left out on purpose: sharded output, and code that ships with a model (`trust_remote_code`).
"""

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.base.architecture import empty_model, read_architecture
from shared.base.gguf import is_gguf, open_gguf, read_tensors, write_files
from shared.config.model import (
    CACHE_DIR_KEY,
    SECOND_COPY,
    ModelConfig,
    cache_root,
    hub_cache_folder,
    in_hub_cache,
    weight_files,
)
from shared.embedded import EMBEDDED
from shared.errors import DamageError, ModelError
from shared.model.layers.linears import is_decoder_linear as is_linear
from shared.model.layers.nf4 import BLOCK, PARTS, STATE_KEY, WEIGHTS, from_tensors, quantize, read_facts
from shared.run.file_lock import exclusive
from shared.run.files import made_whole, make_folder, remove_unfinished, sync_files
from shared.tensor_file import header, save_tensors, values_of

DIGESTS = "DIGESTS.json"
CACHE_FORMAT = 4
"""Changes with the content of a cached folder, so that older folders are not used."""
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NEIGHBOURS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linears that follow each other in the file of a dense base, their biases apart."""
CPU = torch.device("cpu")
QUANTIZATION_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
}


@dataclass(frozen=True, kw_only=True)
class CachedBase:
    """A base that is ready to load."""

    folder: Path
    """Hugging Face model folder."""
    digest: str
    """sha256 of its weight file."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as it was published."""

    folder: Path
    """config.json, tokenizer and chat template."""
    gguf: Path | None
    """The file with its tensors; None if they are in `weight_files` of the folder."""


def cached_base(model: ModelConfig) -> CachedBase:
    """The folder for this model and quantisation, made now if it does not exist."""
    source = find_model(model)
    folder = base_folder(source.folder, model)
    make_folder(folder.parent, place=CACHE_DIR_KEY)
    with exclusive(folder.with_name(f"{folder.name}.lock"), CACHE_DIR_KEY):
        if not folder.is_dir():
            write_base(source, folder, model.quantization)
    return CachedBase(folder=folder, digest=checked_digests(folder)[WEIGHTS])


def existing_base(model: ModelConfig) -> Path | None:
    """The folder of `cached_base` if it is there already, without the network; otherwise None. That of a .gguf file is
    found by the file's name, if it is the only one of that name. It may be of an older file: nothing may rely on it."""
    if is_gguf(model.path):
        name = f"{glob.escape(Path(model.path).stem)}-gguf-{CACHE_FORMAT}-????????????????"
        sources = list(cache_root(model).glob(name))
    else:
        place = EMBEDDED.get(model.path, Path(model.path))
        # The hub's library follows links.
        sources = [place if os.path.isdir(place) else in_hub_cache(model, hub_cache_folder().resolve())]
    if len(sources) != 1 or not os.path.isdir(sources[0]):
        return None
    folder = base_folder(sources[0], model)
    return folder if folder.is_dir() else None


def checked_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file as read now; DamageError if one differs from what was written."""
    digests = digests_of(folder)
    try:
        written = json.loads((folder / DIGESTS).read_bytes())
    except (OSError, ValueError):
        written = None
    if digests != written:
        names = (
            sorted(digests)
            if not isinstance(written, dict)
            else sorted(name for name in digests.keys() | written.keys() if digests.get(name) != written.get(name))
        )
        raise DamageError(
            f"The cached base {folder} is damaged: {', '.join(names)} is not what was written there (a torn write or a"
            " flipped bit); remove that folder, and the next start makes it again from the model's own files."
        )
    return digests


def digests_of(folder: Path) -> dict[str, str]:
    """File name -> sha256, for all files but the list itself."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != DIGESTS}


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_model(model: ModelConfig) -> ModelSource:
    if is_gguf(model.path):
        return ModelSource(folder=gguf_folder(Path(model.path), cache_root(model)), gguf=Path(model.path))
    folder = EMBEDDED.get(model.path, Path(model.path))
    if not os.path.isdir(folder):
        folder = fetch_from_hub(model)
    files = weight_files(folder)
    if not (folder / "config.json").is_file() or not files:
        raise ModelError(f"{folder} is not a model: expected config.json and *.safetensors there; check model.path.")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names; get the model's files again.")
    return ModelSource(folder=folder, gguf=None)


def gguf_folder(file: Path, root: Path) -> Path:
    """The folder with what the file says besides its tensors, made now if it does not exist."""
    if not os.path.isfile(file):
        raise ModelError(f"model.path = '{file}' is not a file; check the name.")
    folder = root / f"{file.stem}-gguf-{CACHE_FORMAT}-{file_digest(file)[:16]}"
    make_folder(root, place=CACHE_DIR_KEY)
    with exclusive(folder.with_name(f"{folder.name}.lock"), CACHE_DIR_KEY):
        if not folder.is_dir():
            remove_unfinished(folder)
            with made_whole(folder, CACHE_DIR_KEY) as work:
                write_files(open_gguf(file), work)
                sync_files(work)
    return folder


def fetch_from_hub(model: ModelConfig) -> Path:
    """The folder in the hub's own cache, downloaded on first use."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
    with hub_errors(f"model.path = '{model.path}'", "a model"):
        return Path(
            snapshot_download(
                model.path, revision=model.revision, allow_patterns=patterns, ignore_patterns=[f"{SECOND_COPY}*"]
            )
        )


@contextmanager
def hub_errors(named: str, what: str) -> Iterator[None]:
    """Turns what the hub's library raises into one sentence. named: the key and its value. what: `a model`."""
    # HTTPError comes from the hub library's own HTTP library. A connection that breaks raises it; it is no OSError.
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
        LocalEntryNotFoundError,
    )

    try:
        yield
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{named} is neither a folder nor {what} that the hub provides here ({type(error).__name__});"
            f" {hub_remedy(error)}, or give a local folder."
        ) from error


def hub_remedy(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return "check the name"
    if constants.is_offline_mode():
        return "unset HF_HUB_OFFLINE to have it fetched"
    if isinstance(error, errors.GatedRepoError):
        return "ask its owner for access on its page there and set HF_TOKEN"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return "check the name, and set HF_TOKEN to a token that the hub accepts"
    if isinstance(error, errors.RevisionNotFoundError):
        return "check model.revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "check the name, and set HF_TOKEN if it is private"
    return "check the name and the network"


def base_folder(source: Path, model: ModelConfig) -> Path:
    """Where its quantised base is kept, whether it exists or not."""
    return cache_root(model) / f"{source.name}-{model.quantization}-{cache_key(source, model.quantization)}"


def cache_key(source: Path, quantization: str) -> str:
    """Changes when a source file or the quantisation changes."""
    files = sorted(p for p in source.iterdir() if p.suffix in (".safetensors", ".json", ".jinja"))
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps([CACHE_FORMAT, str(source), quantization, BLOCK, stamps]).encode()).hexdigest()[
        :16
    ]


def write_base(source: ModelSource, folder: Path, quantization: str) -> None:
    # An unsupported model is refused before minutes are spent on it.
    lm = empty_model(read_architecture(source.folder))
    shapes = {name: value.shape for name, value in lm.named_parameters()}
    remove_unfinished(folder)
    with made_whole(folder, CACHE_DIR_KEY) as work:
        for file in small_files(source.folder):
            shutil.copyfile(file, work / file.name)
        config: dict[str, Any] = json.loads((source.folder / "config.json").read_text())
        if quantization == "nf4":
            config["quantization_config"] = QUANTIZATION_CONFIG
            (work / "config.json").write_text(json.dumps(config, indent=2))
        stored = read_tensors(open_gguf(source.gguf), shapes) if source.gguf else stored_tensors(source.folder)
        save_tensors(converted(stored, quantization), work / WEIGHTS)
        list_digests(work)


def small_files(folder: Path) -> Iterator[Path]:
    """Configuration, tokenizer and chat template. ModelError for a link that leads elsewhere: whoever made the folder
    may want a secret file of this machine in the cache, and in every export."""
    place = folder.resolve()
    # The hub's library keeps the files of all revisions beside them, and links to them.
    places = (place, place.parents[1] / "blobs") if place.parent.name == "snapshots" else (place,)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            # An installer may have linked all files of a package.
            own = folder in EMBEDDED.values() or any(map(file.resolve().is_relative_to, places))
            if not own or not file.is_file():
                raise ModelError(
                    f"{file} is no file of that folder: it leads to {file.resolve()}; copy what the model needs there,"
                    " or remove it."
                )
            yield file


def list_digests(folder: Path) -> None:
    """Finish a base: write the digests and make all files durable."""
    (folder / DIGESTS).write_text(json.dumps(digests_of(folder), indent=2))
    sync_files(folder)


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every tensor of its weight files."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as reader:
            yield from ((name, reader.get_tensor(name)) for name in reader.keys())  # noqa: SIM118 - not a dictionary


def converted(stored: Iterable[tuple[str, torch.Tensor]], quantization: str) -> dict[str, torch.Tensor]:
    """All tensors of the model, the decoder's linears quantised."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored:
        quantised = quantization == "nf4" and is_decoder_linear(name, tensor)
        tensors |= quantize(tensor).tensors(name) if quantised else {name: tensor}
    return tensors


def is_decoder_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether to quantise it; embedding and head stay as they are, as in every bitsandbytes model."""
    inside = is_linear(name, tensor.dim())
    if inside and tensor.numel() % BLOCK:
        raise ModelError(
            f"'{name}' has {tensor.numel()} values, but NF4 needs whole blocks of {BLOCK}; use model.quantization=none."
        )
    return inside


@dataclass(frozen=True, kw_only=True)
class DenseTensor:
    """One tensor of the file that is written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    is_nf4: bool
    """Whether the cached base has its codes."""
    is_as_stored: bool
    """Whether the cached base has these very bytes."""


def dense_base(base: CachedBase, dtype: torch.dtype) -> CachedBase:
    """The folder with the values of this base, made now if it does not exist. It has its own digest. A base without
    codes that already has this type is its own dense base."""
    with safe_open(base.folder / WEIGHTS, framework="pt") as reader:
        if all(tensor.is_as_stored for tensor in planned(reader, dtype)):
            return base
    return made_from(base, SUFFIXES[dtype], lambda work: write_dense(base.folder, work, dtype))


def made_from(base: CachedBase, name: str, write: Callable[[Path], None]) -> CachedBase:
    """The folder of this name that belongs to the base, made now if it does not exist. write: fills it."""
    folder = base.folder.with_name(f"{base.folder.name}-{name}-{base.digest[:16]}")
    with exclusive(folder.with_name(f"{folder.name}.lock"), CACHE_DIR_KEY):
        if not folder.is_dir():
            remove_unfinished(folder)
            with made_whole(folder, CACHE_DIR_KEY) as work:
                write(work)
                list_digests(work)
    return CachedBase(folder=folder, digest=checked_digests(folder)[WEIGHTS])


def write_dense(source: Path, work: Path, dtype: torch.dtype) -> None:
    for file in source.iterdir():
        if file.name not in (WEIGHTS, DIGESTS):
            shutil.copyfile(file, work / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (work / "config.json").write_text(json.dumps(config, indent=2))
    with safe_open(source / WEIGHTS, framework="pt") as reader:
        write_tensors(reader, work / WEIGHTS, dtype)


def write_tensors(reader: Any, file: Path, dtype: torch.dtype) -> None:
    """A file in safetensors' format, with all numbers in this type."""
    # Wide types first, so that each tensor begins at a multiple of its own type.
    plan = sorted(planned(reader, dtype), key=lambda tensor: -tensor.dtype.itemsize)
    with file.open("wb") as out:
        out.write(header(plan))
        for tensor in plan:
            values = dense_tensor(reader, tensor)
            out.write(values_of(values))


def planned(reader: Any, dtype: torch.dtype) -> Iterator[DenseTensor]:
    """Every tensor of the model, without the scales of the codes. Whole numbers keep their type."""
    names = set(reader.keys())
    codes = {name for name in names if f"{name}.{STATE_KEY}" in names}
    scales = {f"{name}.{part}" for name in codes for part in PARTS}
    for name in sorted(names - scales, key=place_in_file):
        if name in codes:
            shape = read_facts(reader.get_tensor(f"{name}.{STATE_KEY}"))["shape"]
            yield DenseTensor(name=name, shape=torch.Size(shape), dtype=dtype, is_nf4=True, is_as_stored=False)
        else:
            tensor = reader.get_tensor(name)
            own = dtype if tensor.is_floating_point() else tensor.dtype
            stored = own == tensor.dtype
            yield DenseTensor(name=name, shape=tensor.shape, dtype=own, is_nf4=False, is_as_stored=stored)


def place_in_file(name: str) -> tuple[str, str, int, str]:
    """Sorts neighbours together: by module, then by kind, then in their order."""
    rest, _, kind = name.rpartition(".")
    parent, _, linear = rest.rpartition(".")
    if linear in NEIGHBOURS:
        return parent, kind, NEIGHBOURS.index(linear), name
    return rest, kind, 0, name


def dense_tensor(reader: Any, tensor: DenseTensor) -> torch.Tensor:
    name = tensor.name
    if not tensor.is_nf4:
        return reader.get_tensor(name).to(tensor.dtype)
    parts = {key: reader.get_tensor(key) for key in (name, *(f"{name}.{part}" for part in PARTS))}
    return from_tensors(name, parts, CPU).dequantize(tensor.dtype)
