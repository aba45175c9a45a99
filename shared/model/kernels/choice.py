"""Which of the kernels a process uses: chosen on its machine when it starts, and on a card kept.

    compute.kernels   `torch`      PyTorch's own operations
                      `triton`     on a card, every kernel that agrees with PyTorch
                      `compiled`   on a CPU, C code (shared/model/compiled) if it agrees with PyTorch
                      `auto`       on a card, kernels that agree and are also quicker here (trial.py), each judged for
                                   itself; on a CPU with AVX2, C code

Where Triton or GCC cannot start, and where a kernel fails or does not agree, PyTorch computes and the log says why;
that never ends a process.

Kernel and torch version differ in rounding, so a run must not change between them. On a CPU, `auto` becomes one of the
others when a run starts (shared/process/processor.py). On a card, the first process that chooses writes its choice into
the cache folder, and all others read it: the other process of the run, `resume`, and `replay`. It belongs to what the
choice depends on: card, driver, versions of PyTorch and Triton, the code in this folder, the setting, and the shapes.
It is not part of the run directory, since an actor may be on another machine, and another card has other kernels in
every library besides. If the cache folder is emptied, the measurement is made again; the other settings do not depend
on it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.config.model import CACHE_DIR_KEY
from shared.config.processes import ComputeConfig
from shared.model.compiled.kernels import load_kernels
from shared.model.kernels.toolchain import Toolchain, look_at_toolchain, missing
from shared.model.kernels.trial import TRIALS, Judgement, Seconds, Trial, card_seconds, judge
from shared.model.policy import TORCH, Kernels, Policy
from shared.process.card import CardFacts, card_facts
from shared.process.processor import AVX2_FLAG, read_flags
from shared.run.file_lock import exclusive
from shared.run.files import make_folder, write_whole
from shared.run.run_dir import CPUINFO

Trials = Mapping[str, Callable[[Policy], Trial]]

log = logging.getLogger("kernels")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The file in the cache folder."""

    facts: dict[str, Any]
    """What it depends on."""
    kernels: dict[str, Judgement]
    """By field of `Kernels`."""


def policy_with_kernels(policy: Policy, compute: ComputeConfig, cache: Path) -> Policy:
    """cache: the folder of the choice, and of what is compiled."""
    setting = compute.kernels
    if policy.device.type == "cpu":
        compiled = can_be_compiled(compute)
        return policy.with_kernels(compiled_kernels(policy.dtype, cache)) if compiled else policy
    if setting in ("torch", "compiled"):
        return policy
    toolchain = look_at_toolchain()
    if lacks := missing(toolchain):
        reasons = "; ".join(f"{lack.found}: {lack.remedy}" for lack in lacks)
        log.warning("PyTorch's own operations compute instead of Triton's kernels, because %s", reasons)
        return policy
    facts = facts_of(policy, setting, toolchain, card_facts(policy.device))
    return policy.with_kernels(chosen_kernels(policy, facts, cache, TRIALS, card_seconds))


def can_be_compiled(compute: ComputeConfig) -> bool:
    """Whether C code was asked for, or may be taken on this processor."""
    return compute.kernels == "compiled" or (compute.compiles and AVX2_FLAG in read_flags(CPUINFO))


def compiled_kernels(dtype: torch.dtype, cache: Path) -> Kernels:
    """PyTorch's if there is no C code here; the log says why."""
    found = load_kernels(dtype, cache)
    if found is None:
        return TORCH
    log.info("%s computes what an update needs between its products", found.name)
    return Kernels(sums=found.sums, math=found.math)


def chosen_kernels(policy: Policy, facts: Mapping[str, Any], cache: Path, trials: Trials, seconds: Seconds) -> Kernels:
    """As it was chosen before for these facts, or as it is chosen now."""
    file = cache / f"kernels-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}.json"
    make_folder(cache, place=CACHE_DIR_KEY)
    with exclusive(file.with_suffix(".lock"), CACHE_DIR_KEY):
        choice = read_choice(file)
        if choice is None:
            choice = Choice(facts=dict(facts), kernels=judge_all(policy, facts["setting"], trials, seconds))
            if all(judgement.lasting for judgement in choice.kernels.values()):
                # A file that a power cut takes costs one more measurement.
                write_whole(file, msgspec.json.format(msgspec.json.encode(choice)), durable=False, place=CACHE_DIR_KEY)
    for name, judgement in choice.kernels.items():
        level = logging.INFO if judgement.lasting else logging.WARNING
        log.log(level, "%s is computed by %s: %s", name, judgement.use, judgement.why)
    used = {name: trials[name](policy).kernel for name, one in choice.kernels.items() if one.use == "triton"}
    return replace(TORCH, **used)


def judge_all(policy: Policy, setting: str, trials: Trials, seconds: Seconds) -> dict[str, Judgement]:
    return {
        name: judge(lambda trial=trial: trial(policy), forced=setting == "triton", seconds=seconds)
        for name, trial in trials.items()
    }


def read_choice(file: Path) -> Choice | None:
    """None if there is none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Choice)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def facts_of(policy: Policy, setting: str, toolchain: Toolchain, card: CardFacts) -> dict[str, Any]:
    """Everything that the choice depends on, as JSON has it."""
    sources = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(source.name.encode() + b"\0" + source.read_bytes())
    layers = policy.adapter.layers.values()
    return {
        "setting": setting,
        "card": [card.name, card.driver],
        "torch": str(torch.__version__),
        "triton": toolchain.triton,
        "code": sources.hexdigest(),
        "dtype": str(policy.dtype),
        "head": list(policy.head.shape),
        "logits": [policy.form.bias is not None, policy.form.scale, policy.form.cap],
        "adapter": sorted({(*one.lora_A.shape, len(one.lora_B)) for one in layers}),
    }
