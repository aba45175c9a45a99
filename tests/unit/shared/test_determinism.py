"""What is pinned so that the same numbers come out twice. Each case is a process of its own: pinning is for good."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from shared.process.determinism import SPINS, cpu_environment

ROOT = Path(__file__).resolve().parents[3]
REPORT = """
import json, sys
from shared.process.determinism import pin_torch, record
threads = int(sys.argv[1])
pin_torch(threads)
pin_torch(threads)
print(json.dumps(record()))
"""
# The same products from operands at four different offsets from a cache line.
PRODUCTS = """
import hashlib, sys, torch
from shared.process.determinism import pin_torch
pin_torch(int(sys.argv[1]))

def shifted(tensor, offset):
    room = torch.zeros(tensor.numel() + 16)
    view = room[offset : offset + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)

for offset in (0, 1, 3, 5):
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for m, k, n in ((33, 128, 128), (1, 128, 128), (129, 131, 77), (512, 128, 352)):
        a, b = torch.randn(m, k), torch.randn(n, k)
        digest.update((shifted(a, offset) @ shifted(b, offset).T).numpy().tobytes())
    print(digest.hexdigest())
"""


def in_process(script: str, threads: int, blas: Literal["fast", "portable"]) -> str:
    """What the script prints under the pinned environment."""
    environment = os.environ | cpu_environment(threads, blas) | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", script, str(threads)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_environment_fixes_threads_and_kernels() -> None:
    fast, portable = cpu_environment(3, "fast"), cpu_environment(3, "portable")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert fast[name] == portable[name] == "3"
    assert fast["GOMP_SPINCOUNT"] == portable["GOMP_SPINCOUNT"] == SPINS
    assert fast["MKL_CBWR"] == "AUTO,STRICT"
    assert portable["MKL_CBWR"] == "AVX2,STRICT"
    assert "ATEN_CPU_CAPABILITY" not in fast
    assert fast["TOKENIZERS_PARALLELISM"] == "false"
    assert not any(name.startswith("HF_") for name in fast)


@pytest.mark.parametrize(("threads", "blas"), [pytest.param(1, "fast", marks=pytest.mark.long), (2, "portable")])
def test_pin_torch_puts_it_in_force_and_record_says_so(threads: int, blas: Literal["fast", "portable"]) -> None:
    found: dict[str, Any] = json.loads(in_process(REPORT, threads, blas))
    assert found["threads"] == threads
    assert found["interop_threads"] == 1
    assert found["deterministic"] is True
    assert found["environment"] == cpu_environment(threads, blas)
    if blas == "portable":
        assert found["cpu_capability"] in ("AVX2", "DEFAULT")


def test_a_product_has_the_same_bits_wherever_its_operands_lie_and_however_many_threads() -> None:
    digests = {line for threads in (1, 2) for line in in_process(PRODUCTS, threads, "fast").split()}
    assert len(digests) == 1
