"""What a run computes with on this machine: the values that `auto` and 0 in [compute] become, once, when a run starts.

    dtype       bf16 on a card; on a CPU with instructions for it, if the weights are large enough to gain; else fp32
    weights     where our own loop samples in bf16 on a CPU: the codes, if C code has AVX512-VBMI, or PyTorch
                AVX512-BF16 but not AMX
    head        where it samples long completions in bf16 on a CPU with VNNI: 8 bits
    token_step  where it samples on a CPU and GCC is there: C code, in fp32 with AVX2, in bf16 with AMX, or AVX512-BF16
                and AVX512-VBMI
    kernels     on a CPU with AVX2 and GCC: C code; on a card `auto` stays, since only a measurement can choose
    threads     all physical cores that the container allows; half of them for each process if both compute at once

`weights`, `head` and `token_step` are those of [actor]. They are kept in the run's config.json. Resume, actors that
join later, replay and eval take them from there: another choice on another machine would give other numbers. `run`
chooses when it makes a run; a run that was only prepared has no choice yet, and who starts it first, `resume` or the
learner, makes it for that machine (`start_config`). Only files are read, since torch must not be loaded before the
environment of a run is set.

With small matrices, bf16 is slower where it counts: at 8 rows, as in decoding, a product with a 384 x 128 weight takes
1.6 times as long as in fp32, one of 1152 x 384 takes 0.8 times and one of 1728 x 576 0.35 times (one core with AMX).
A small model, and the CPU's part of work on a card, do not gain from more than two threads. Two threads that share the
work of many small products wait for each other at the end of each: beside busy processes a step of the embedded model
took 4 to 17 s with two and 0.8 to 1.4 s with one, and 0.37 and 0.44 s on a quiet machine. So where other processes
compute when the choice is made, a small model gets one.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import structs

from shared.config.load import config_from_json, config_to_json
from shared.config.model import ModelConfig, hub_cache_folder, in_hub_cache
from shared.config.processes import EIGHT_BIT_TOKENS, ComputeConfig
from shared.config.tree import Config
from shared.embedded import EMBEDDED
from shared.process.busy_cores.gathering import CORES
from shared.process.usable_cards import check_cards, has_card
from shared.run.files import write_whole
from shared.run.run_dir import CPUINFO, RunDir

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
"""As Linux lists them: x86 and Arm."""
CODES_FLAG = "avx512_bf16"
"""Of processors that multiply by codes (actor/engines/token_step/coded.py)."""
AVX2_FLAG = "avx2"
"""Of processors for which C code was measured: updates, and in fp32 the token step."""
AVX512_FLAG = "avx512f"
"""Of processors with AVX-512."""
VBMI_FLAG = "avx512vbmi"
"""Of processors for which C code that reads codes has instructions to look up their values."""
AMX_FLAG = "amx_bf16"
"""Of processors whose matrix units C code uses. In PyTorch, codes take as long as dense values there with 8 rows, and
three times as long with 32."""
EIGHT_BIT_FLAG = "avx512_vnni"
"""Of processors that multiply in 8 bits (actor/engines/token_step/eight_bit.py)."""
WEIGHT_FILES = ("*.safetensors", "*.gguf")
LARGE_BYTES = 40 * 10**6
"""Size of the weight files above which bf16 is faster: 20 million parameters in two bytes."""
MAX_THREADS_SMALL = 2
C_CODE_COMPILERS = ("gcc",)
"""Of C code (shared/model/compiled, actor/engines/token_step/compiled)."""
INSTALL_COMPILER = "install a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev), or name one in CC"
BUSY = 0.5
"""So many other threads that run, for each core, that ours would wait for them."""
LOADAVG = Path("/proc/loadavg")
LOOKS, BETWEEN_LOOKS_S = 5, 0.02
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPUS = Path("/sys/devices/system/cpu")
NO_LIMIT = 2**60
"""Version 1 of cgroups writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What this machine offers to a run."""

    flags: frozenset[str]
    """Features of the processor."""
    cores: int
    """Physical cores that may be used."""
    card: bool
    """Whether there is one that PyTorch can use."""
    others: float = 0.0
    """Other processes that compute now, for each core of the machine."""
    compiler: bool = False
    """Whether there is one for C code."""


def look_at_capacity() -> Capacity:
    return Capacity(
        flags=read_flags(CPUINFO),
        cores=usable_cores(os.sched_getaffinity(0), CPUS, container_cores(CGROUPS, OWN_CGROUP)),
        card=has_card(),
        others=others_for_each_core(),
        compiler=find_compiler(os.environ, C_CODE_COMPILERS) is not None,
    )


def find_compiler(environment: Mapping[str, str], known: Sequence[str] = ("gcc", "clang")) -> str | None:
    """Path of the C compiler, as Triton looks for it: CC decides alone. known: else the first of these."""
    path, named = environment.get("PATH"), environment.get("CC")
    names = (named,) if named else known
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def others_for_each_core() -> float:
    """Other threads that run now, for each logical core of the machine."""
    return others_running(LOADAVG) / (os.cpu_count() or 1)


def is_busy() -> bool:
    """Whether so many others run that what is measured now would not hold on a quiet machine."""
    return others_for_each_core() >= BUSY


def others_running(loadavg: Path) -> float:
    """Mean of a few looks in a tenth of a second. The averages of the file itself would still count a run that has just
    ended."""
    running = 0
    for _ in range(LOOKS):
        running += int(loadavg.read_text().split()[3].partition("/")[0]) - 1
        time.sleep(BETWEEN_LOOKS_S)
    return max(running / LOOKS, 0.0)


def start_config(run: RunDir, found: Capacity | None = None) -> Config:
    """The configuration of a run that starts or goes on here. The first start of a prepared run makes the choice and
    keeps it. Call it with the run locked. found: None looks at this machine, and ConfigError if the learner's card
    cannot be used here."""
    config = config_from_json(run.config.read_bytes())
    card = {} if found else check_cards(config.compute, ("learner",))
    if not is_open(config):
        return config
    config = settled_config(config, found)
    write_choices(run, config, card)
    return config


def write_choices(run: RunDir, config: Config, card: Mapping[str, str]) -> None:
    """Into run.json and config.json. The latter comes last, because it decides: if this is cut off, the next start
    chooses again."""
    run.write_info(structs.asdict(config.compute), card)
    write_whole(run.config, config_to_json(config))


def settled_config(config: Config, found: Capacity | None = None) -> Config:
    """With nothing left to choose. found: None looks at this machine."""
    found = found or look_at_capacity()
    compute = settled(config.compute, config.model, config.pipeline.max_lag, found)
    weights, head, token_step = config.actor.weights, config.actor.head, config.actor.token_step
    if token_step == "auto":
        token_step = chosen_token_step(config, compute, found)
    if weights == "auto":
        weights = chosen_weights(config, compute, found, token_step)
    if head == "auto":
        head = chosen_head(config, compute, found)
    actor = structs.replace(config.actor, weights=weights, head=head, token_step=token_step)
    return structs.replace(config, compute=compute, actor=actor)


def is_open(config: Config) -> bool:
    """Whether something is left to choose. `device = auto` may stay: only torch knows whether a card can be used.
    `weights` and `head` may stay `auto` where they are dense in any case, and all three where `hf` does not sample.
    `kernels` may stay too: a process chooses when it starts (shared/model/kernels/choice.py)."""
    compute, actor = config.compute, config.actor
    in_bf16 = "auto" in (actor.weights, actor.head) and compute.dtype != "fp32"
    sampling = actor.engine == "hf" and (actor.token_step == "auto" or in_bf16)
    return compute.dtype == "auto" or sampling or not (compute.learner_threads and compute.actor_threads)


def chosen_weights(config: Config, compute: ComputeConfig, found: Capacity, token_step: str) -> Literal["dense", "nf4"]:
    """What an actor samples from. On a card, `hf` has what `model.dequantize` leaves in memory."""
    model = config.model
    if config.actor.engine == "hf" and model.quantization != "none" and is_on_card(compute, found):
        return "dense" if model.dequantize == "once" else "nf4"
    in_torch = CODES_FLAG in found.flags and AMX_FLAG not in found.flags
    helps = VBMI_FLAG in found.flags if token_step == "compiled" else in_torch
    return "nf4" if helps and decodes_in_bf16(config, compute, found) else "dense"


def chosen_head(config: Config, compute: ComputeConfig, found: Capacity) -> Literal["dense", "int8"]:
    """What logits come from while an actor decodes."""
    helps = EIGHT_BIT_FLAG in found.flags and config.rollout.max_new_tokens >= EIGHT_BIT_TOKENS
    return "int8" if helps and decodes_in_bf16(config, compute, found) else "dense"


def chosen_token_step(config: Config, compute: ComputeConfig, found: Capacity) -> Literal["torch", "compiled"]:
    """What computes a token of `hf`."""
    dense = config.model.quantization == "none" or config.model.dequantize != "each_call"
    sampled_here = config.actor.engine == "hf" and compute.blas == "fast" and not is_on_card(compute, found)
    needed = ({AVX2_FLAG},) if compute.dtype == "fp32" else ({AMX_FLAG}, {CODES_FLAG, VBMI_FLAG})
    helps = any(flags <= found.flags for flags in needed)
    return "compiled" if found.compiler and dense and sampled_here and helps else "torch"


def decodes_in_bf16(config: Config, compute: ComputeConfig, found: Capacity) -> bool:
    """Whether `hf` decodes in bf16 on a CPU, with the dense values of an NF4 base in memory."""
    model, actor = config.model, config.actor
    from_values = model.quantization != "none" and model.dequantize != "each_call"
    in_bf16 = compute.dtype == "bf16" and compute.blas == "fast" and not is_on_card(compute, found)
    return actor.engine == "hf" and from_values and in_bf16


def is_on_card(compute: ComputeConfig, found: Capacity) -> bool:
    return compute.device == "cuda" or (compute.device == "auto" and found.card)


def settled(compute: ComputeConfig, model: ModelConfig, max_lag: int, found: Capacity) -> ComputeConfig:
    on_card = is_on_card(compute, found)
    large = is_large(model)
    share = max(found.cores // (2 if max_lag else 1), 1)
    small = 1 if found.others >= BUSY and not on_card else MAX_THREADS_SMALL
    threads = min(share, 256 if large and not on_card else small)
    dtype = compute.dtype
    if dtype == "auto":
        dtype = "bf16" if on_card or (large and bf16_instructions(compute, found)) else "fp32"
    return structs.replace(
        compute,
        dtype=dtype,
        kernels=compute.kernels if on_card else chosen_kernels(compute, found),
        learner_threads=compute.learner_threads or max(threads // compute.ranks, 1),
        actor_threads=compute.actor_threads or threads,
    )


def chosen_kernels(compute: ComputeConfig, found: Capacity) -> Literal["triton", "compiled", "torch"]:
    """What computes between the products of an update on a CPU."""
    if compute.kernels != "auto":
        return compute.kernels
    return "compiled" if compute.compiles and found.compiler and AVX2_FLAG in found.flags else "torch"


def bf16_instructions(compute: ComputeConfig, found: Capacity) -> str:
    """The widest that may be used; empty if there are none."""
    known = [flag for flag in BF16_FLAGS if flag in found.flags]
    return known[0] if known and compute.blas == "fast" else ""


def is_large(model: ModelConfig) -> bool:
    """By the size of the weight files. A model that is not on this machine yet counts as large."""
    found = weight_bytes(model)
    return found is None or found >= LARGE_BYTES


def weight_bytes(model: ModelConfig) -> int | None:
    """Of the weight files: the .gguf file, or those in the folder or in the hub's cache. None if there are none yet."""
    place = EMBEDDED.get(model.path, Path(model.path))
    # Unlike those of Path, these say no to a name that no file can have.
    if os.path.isfile(place):
        return place.stat().st_size
    folder = place if os.path.isdir(place) else in_hub_cache(model, hub_cache_folder())
    patterns = WEIGHT_FILES if os.path.isdir(folder) else ()
    # In the hub's cache they are links, which may lead nowhere.
    files = [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
    return sum(file.stat().st_size for file in files) if files else None


def read_flags(cpuinfo: Path) -> frozenset[str]:
    """The flags of the first core."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(named[0]) if named else frozenset()


def gains_by_packing(flags: frozenset[str], compute: ComputeConfig) -> bool:
    """Whether packed weights may make a token step faster (actor/engines/token_step/packed.py). With AMX they were not
    faster in bf16 where it was measured; in fp32 see `is_for_onednn`."""
    if compute.dtype == "bf16":
        return AMX_FLAG not in flags
    return AVX2_FLAG in flags and (AVX512_FLAG not in flags or compute.blas == "portable")


def usable_cores(allowed: Iterable[int], cpus: Path, container: float | None) -> int:
    """Physical cores among the logical ones that this process may use, at most what the container allows."""
    logical = sorted(allowed)
    files = [cpus / f"cpu{number}" / "topology" / "thread_siblings_list" for number in logical]
    cores = {file.read_text() if file.is_file() else file.parent.parent.name for file in files}
    return within(len(cores), container)


def within(cores: int, container: float | None) -> int:
    """At most so many whole cores as the container allows, and one at least."""
    return max(min(cores, int(container or cores)), 1)


def cores_here(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Logical cores that the processes of a run share on this machine."""
    return within(len(CORES), container_cores(root, own))


def container_cores(root: Path, own: Path) -> float | None:
    """Processor time in cores that the container allows; None if there is no limit."""
    return min((share for folder in cpu_groups(root, own) if (share := cpu_share(folder)) is not None), default=None)


def cpu_groups(root: Path, own: Path) -> list[Path]:
    paths = group_paths(own)
    return [*levels(root, paths.get("", "/")), *levels(root / "cpu", paths.get("cpu", "/"))]


def group_paths(own: Path) -> dict[str, str]:
    """Controller -> path of this process's group; version 2 has one for all, under an empty name."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    return {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}


def levels(root: Path, path: str) -> list[Path]:
    """The folder of the group and those above it. In a container, the path may name folders that only the host has."""
    folder = root / path.lstrip("/")
    return [level for level in (folder, *folder.parents) if level.is_relative_to(root) and level.is_dir()]


def cpu_share(folder: Path) -> float | None:
    """Processor time, in cores."""
    both = folder / "cpu.max"
    if both.is_file():
        quota, period = both.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    old = number(folder, "cpu.cfs_quota_us"), number(folder, "cpu.cfs_period_us")
    return old[0] / old[1] if old[0] is not None and old[1] else None


def number(folder: Path, *names: str) -> int | None:
    """The number in the first of these files that exists; None for `max` and -1."""
    texts = [(folder / name).read_text().strip() for name in names if (folder / name).is_file()]
    value = int(texts[0]) if texts and texts[0].isdecimal() else NO_LIMIT
    return value if value < NO_LIMIT else None
