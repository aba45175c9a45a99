"""What the machine is: versions, compiler, driver, card, and the two ceilings that everything else is compared with.

bytes a second    a copy of gigabytes on the card, counting what is read and what is written
FLOP a second     a product of two bf16 matrices of 8192 x 8192 random values
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.measured import Note, Place, timed
from benchmarks.machine import machine

PACKAGES = ("triton", "msgpack", "huggingface_hub", "tokenizers", "trl", "peft", "accelerate", "datasets", "vllm")
TOOLS = {"gcc": ["--version"], "nvcc": ["--version"], "nvidia-smi": ["-L"]}
ASKED = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,persistence_mode,compute_mode"
ROUNDS = 10


def facts(place: Place, note: Note) -> None:
    note(machine=machine(), packages={name: installed(name) for name in PACKAGES}, system=platform.platform())
    note(tools={name: told(name, *words) for name, words in TOOLS.items()}, headers=has_headers())
    note(torch={"cuda": torch.version.cuda, "git": torch.version.git_version, "cuda_seen": torch.cuda.is_available()})
    if place.device.type == "cuda":
        note(card=told("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"), properties=properties())
    note(quantising=quantising(place))
    note(ceilings=ceilings(place))


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def told(tool: str, *words: str) -> str | None:
    """What a program prints; None if it is not there."""
    path = shutil.which(tool)
    if path is None:
        return None
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def has_headers() -> dict[str, bool]:
    """What Triton needs to compile its launcher."""
    include = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = subprocess.run(["test", "-f", f"{include}/Python.h"], check=False)
    return {"Python.h": found.returncode == 0, "triton": importlib.util.find_spec("triton") is not None}


def properties() -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "capability": [card.major, card.minor],
        "multiprocessors": card.multi_processor_count,
        "l2_mib": getattr(card, "L2_cache_size", 0) / 2**20,
        "free_gib": round(free / 2**30, 2),
        "total_gib": round(total / 2**30, 2),
        "allocator": torch.cuda.get_allocator_backend(),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def quantising(place: Place) -> dict[str, Any]:
    """Whether bitsandbytes' own library for this device works."""
    from shared.model.layers.nf4 import quantize

    weight = torch.randn(256, 256, device=place.device, dtype=torch.bfloat16)
    seconds, quantised = timed(lambda: quantize(weight), place.device)
    error = (quantised.dequantize(torch.float32) - weight.float()).norm() / weight.float().norm()
    return {"first_s": round(seconds, 3), "relative_error": round(float(error), 4)}


def ceilings(place: Place) -> dict[str, float]:
    """The mean of ten, after three that do not count."""
    elements = place.size(2**32, 2**20)
    source = torch.empty(elements, dtype=torch.uint8, device=place.device).random_(0, 256)
    target = torch.empty_like(source)
    copied = 2 * elements / of_one(lambda: target.copy_(source), place)
    side = place.size(8192, 128)
    a, b = (torch.randn(side, side, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = 2 * side**3 / of_one(lambda: a @ b, place)
    return {"gb_per_s": round(copied / 1e9, 1), "bf16_tflop_per_s": round(multiplied / 1e12, 6)}


def of_one(work: Any, place: Place) -> float:
    """Seconds."""
    for _ in range(3):
        work()

    def several() -> None:
        for _ in range(ROUNDS):
            work()

    return timed(several, place.device)[0] / ROUNDS
