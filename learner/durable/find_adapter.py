"""Finds an adapter that a run is given, and checks it against the run's base before the run is made.

    a folder with adapter_config.json   PEFT's format: an export, a checkpoint of a run, or what TRL and others write
    a run of ours                       its newest checkpoint
    anything else                       a hub id, fetched into the hub's own cache

The base is fetched and quantised for this, if it has not been yet; the run would do it a moment later.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config.load import config_from_json
from shared.config.model import LoraConfig, ModelConfig
from shared.errors import RunDirError
from shared.run.run_dir import RunDir

if TYPE_CHECKING:
    from shared.model.given_adapter import GivenAdapters

ADAPTER_CONFIG = "adapter_config.json"
NOTHING: Mapping[str, bytes] = {}


def given_adapter(key: str, source: str, lora: LoraConfig, model: ModelConfig) -> Mapping[str, bytes]:
    """The files that a run keeps of it; none if the key is empty."""
    if not source:
        return NOTHING
    folder = adapter_folder(key, source)
    # Torch is loaded here, and only for runs that are given an adapter.
    from shared.base.cache import cached_base, find_model
    from shared.model.adapter_file import read_layout
    from shared.model.given_adapter import fitting_adapter

    names = (model.path, str(find_model(model).folder.resolve()))
    return fitting_adapter(folder, read_layout(cached_base(model).folder, lora), names, key)


def adapters_of(run: RunDir, start_from: str, teacher: str) -> "GivenAdapters":
    """The copies in a run; the two keys say which there must be."""
    from shared.model.given_adapter import GivenAdapters, read_given

    return GivenAdapters(
        start=read_given(run.start) if start_from else b"", teacher=read_given(run.teacher) if teacher else b""
    )


def adapter_folder(key: str, source: str) -> Path:
    folder = Path(source)
    if not folder.is_dir():
        return fetched(key, source)
    run = RunDir(folder)
    # A folder with a model has a config.json too, and may have an adapter beside it.
    is_run = run.config.is_file() and run.run_info.is_file() and not (folder / ADAPTER_CONFIG).is_file()
    return newest_checkpoint(key, run) if is_run else folder


def newest_checkpoint(key: str, run: RunDir) -> Path:
    from learner.durable.checkpoint import CheckpointStore

    store = CheckpointStore(run.checkpoints, config_from_json(run.config.read_bytes()).checkpoint.keep)
    newest = store.load_latest()
    if newest is None:
        raise RunDirError(f"{key}: {run.path} has no checkpoint yet; `resume` it until it has one.")
    return store.path(newest.step)


def fetched(key: str, source: str) -> Path:
    """ModelError if the hub has no such adapter, or is out of reach."""
    from huggingface_hub import snapshot_download

    from shared.base.cache import hub_errors

    with hub_errors(f"{key} = '{source}'", "an adapter"):
        return Path(snapshot_download(source, allow_patterns=[ADAPTER_CONFIG, "adapter_model.safetensors"]))
