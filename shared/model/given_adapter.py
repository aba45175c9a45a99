"""An adapter that a run is given (lora.start_from, teacher.adapter): read from PEFT's format, checked, kept in the run.

    start/adapter_model.safetensors   as adapter_file.py writes it, fp32; what resume and replay start from
    start/adapter_config.json         as it came, for people
    teacher/                          the same of the teacher's

An adapter is a difference to one base at one scale. Installed with another scale, other ranks or only a part of its
layers it would be another policy, and training would hide that. So everything must be equal: base, targets, layers,
ranks and scale of every layer. Each has its own sentence, which names the keys to set.

PEFT's patterns are read as PEFT reads them: a key matches a layer whose name ends in it, and may be a regular
expression. Left out on purpose: forms of LoRA that compute something else (DoRA, trained biases or embeddings) or that
changed the base (PiSSA, LoftQ and the like), and weights in a pickle, which is never opened.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from shared.config.model import LoraConfig
from shared.errors import ConfigError, DamageError, ModelError, UserError
from shared.model.adapter_file import PREFIX, LoraLayout, peft_name
from shared.model.layers.lora import PAIR
from shared.tensor_file import tensor_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMPUTES_MORE = (
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "fan_in_fan_out", "alora_invocation_tokens", "use_qalora", "megatron_config"),
)
"""Keys of adapter_config.json that, if set, make it more than W x + s B (A x)."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""init_lora_weights that leave the base as it is."""
QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")
"""How the hub names a copy of a base that somebody quantised."""


@dataclass(frozen=True, kw_only=True)
class PeftLora:
    """What adapter_config.json says of an adapter."""

    base: str
    """Path or hub id; empty if it is not told."""
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    """Pattern -> rank."""
    alphas: Mapping[str, float]
    """Pattern -> alpha."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> "PeftLora":
        return PeftLora(
            base=config.get("base_model_name_or_path") or "",
            rank=config["r"],
            alpha=config["lora_alpha"],
            rslora=bool(config.get("use_rslora")),
            ranks=config.get("rank_pattern") or {},
            alphas=config.get("alpha_pattern") or {},
        )

    def rank_of(self, layer: str) -> int:
        return int(matching(self.ranks, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        return matching(self.alphas, layer, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, kw_only=True)
class GivenAdapters:
    """Adapter files that a run was given; empty where there is none."""

    start: bytes = b""
    """What it starts from."""
    teacher: bytes = b""
    """What its teacher has."""


NONE_GIVEN = GivenAdapters()


def matching(patterns: Mapping[str, float], layer: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def fitting_adapter(
    folder: Path, layout: LoraLayout, bases: Sequence[str], key: str = "lora.start_from"
) -> dict[str, bytes]:
    """The files of `start/`. UserError if the adapter in this folder does not fit the run. bases: names of the run's
    base. key: what names the adapter."""
    try:
        return checked_files(folder, layout, bases)
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error


def checked_files(folder: Path, layout: LoraLayout, bases: Sequence[str]) -> dict[str, bytes]:
    config = read_config(folder)
    theirs = PeftLora.read(config)
    refuse_other_base(folder, theirs.base, bases)
    tensors = read_tensors(folder)
    layers = sorted({layer_of(name) for name in tensors})
    refuse_other_targets(folder, layers, layout.lora)
    refuse_other_layers(folder, layers, list(layout.layers))
    refuse_other_ranks(folder, theirs, layout)
    refuse_other_scale(folder, theirs, layout)
    refuse_other_shapes(folder, tensors, layout)
    return {WEIGHTS: tensor_bytes(tensors), CONFIG: json.dumps(config, indent=2).encode()}


def read_given(folder: Path) -> bytes:
    """The copy in a run."""
    try:
        return (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise DamageError(
            f"{folder / WEIGHTS}, which this run was given, cannot be read ({error.strerror}); restore it."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA; ModelError for anything else."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, start = config["peft_type"], config.get("init_lora_weights", True)
        PeftLora.read(config)
    except OSError as error:
        raise ModelError(f"{folder} has no {CONFIG}; give a folder that PEFT wrote, or a run of ours.") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / CONFIG} is not what PEFT writes ({error}).") from error
    more = next((key for key in COMPUTES_MORE if config.get(key)), "")
    if config.get("bias", "none") != "none":
        more = "bias"
    if kind != "LORA" or more:
        what = f"is of type {kind}" if kind != "LORA" else f"was trained with {more} = {config[more]}"
        raise ModelError(
            f"the adapter in {folder} {what}, and a run trains plain LoRA matrices on linears; merge"
            " it into its base with PEFT, and train that model."
        )
    if start not in PLAIN_STARTS:
        raise ModelError(
            f"the adapter in {folder} began with init_lora_weights = {start!r}, which changed the base"
            " too; convert it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) first."
        )
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors under PEFT's names, fp32 and finite."""
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"{folder} has no {WEIGHTS}; a pickle (adapter_model.bin) is never opened: save the"
            " adapter with safe_serialization=True."
        )
    try:
        tensors = load((folder / WEIGHTS).read_bytes())
    except SafetensorError as error:
        raise ModelError(f"{folder / WEIGHTS} is not a safetensors file ({error}).") from error
    for name, tensor in tensors.items():
        if layer_of(name) == "":
            raise ModelError(
                f"the adapter in {folder} has '{name}', which is no LoRA matrix of a linear; only"
                " those can be trained further."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"'{name}' of the adapter in {folder} has values that are not finite.")
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def layer_of(name: str) -> str:
    """PEFT's name of A or B -> its layer; empty for another tensor."""
    layer, _, half = name.removesuffix(".weight").rpartition(".")
    known = name.startswith(PREFIX) and name.endswith(".weight") and half in PAIR
    return layer.removeprefix(PREFIX) if known else ""


def refuse_other_base(folder: Path, base: str, bases: Sequence[str]) -> None:
    """By name. Where it is the same base under another name, the shapes still have to fit."""
    if base and short(base) not in map(short, bases):
        raise ConfigError(
            f"the adapter in {folder} was trained on '{base}' and this run's model.path is"
            f" '{bases[0]}'; set model.path to that model, or, if it is the same one, correct base_model_name_or_path"
            f" in its {CONFIG}."
        )


def short(base: str) -> str:
    """Without folders or owner, which differ between machines and copies."""
    return QUANTISED.sub("", base.rstrip("/").rpartition("/")[2].lower())


def refuse_other_targets(folder: Path, layers: Sequence[str], lora: LoraConfig) -> None:
    theirs, ours = {layer.rpartition(".")[2] for layer in layers}, set(lora.targets)
    if theirs != ours:
        raise ConfigError(
            f"the adapter in {folder} is on {', '.join(sorted(theirs))} and lora.targets is"
            f" {', '.join(sorted(ours))}; set lora.targets to {json.dumps(sorted(theirs))}."
        )


def refuse_other_layers(folder: Path, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Every layer of the base with such a target has an adapter here."""
    if left := sorted(set(ours) - set(theirs)):
        raise ConfigError(
            f"the adapter in {folder} covers {len(theirs)} of {len(ours)} linears; the first without"
            f" is '{left[0]}': take an adapter that was trained on all layers."
        )
    if more := sorted(set(theirs) - set(ours)):
        raise ConfigError(
            f"the adapter in {folder} changes '{more[0]}', which this base does not have; set"
            " model.path to the model that it was trained on."
        )


def refuse_other_ranks(folder: Path, theirs: PeftLora, layout: LoraLayout) -> None:
    for layer in layout.layers:
        rank = theirs.rank_of(layer)
        if rank != layout.lora.rank_of(layer):
            target = layer.rpartition(".")[2]
            key = "lora.rank" if rank == theirs.rank and target not in layout.lora.ranks else f"lora.ranks {target}"
            raise ConfigError(
                f"the adapter in {folder} has rank {rank} in '{layer}' and this run"
                f" {layout.lora.rank_of(layer)}; set {key} = {rank}."
            )


def refuse_other_scale(folder: Path, theirs: PeftLora, layout: LoraLayout) -> None:
    for layer in layout.layers:
        scale, ours = theirs.scale_of(layer), layout.lora.scale_of(layer)
        if not math.isclose(scale, ours, rel_tol=1e-9):
            raise ConfigError(
                f"the adapter in {folder} is scaled by {scale:g} in '{layer}' and this run's by"
                f" {ours:g}; set lora.alpha = {theirs.alpha:g} and lora.rslora = {json.dumps(theirs.rslora)}"
                f"{' (its alpha_pattern has no counterpart here)' if theirs.alphas else ''}."
            )


def refuse_other_shapes(folder: Path, tensors: Mapping[str, torch.Tensor], layout: LoraLayout) -> None:
    for name, shape in layout.shapes.items():
        found = tensors.get(peft_name(name))
        if found is None or tuple(found.shape) != tuple(shape):
            got = "nothing" if found is None else tuple(found.shape)
            raise ConfigError(
                f"the adapter in {folder} has {got} for '{name}' and this base needs {tuple(shape)};"
                " set model.path to the model that it was trained on."
            )
