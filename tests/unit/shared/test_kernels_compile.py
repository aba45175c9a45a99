"""Triton's compiler accepts every kernel for real cards, and none needs more of a card than the smallest has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES = 48 * 2**10
"""What every card gives a program without being asked."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 90])
def test_every_kernel_compiles_for_a_card(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the extra `kernels` is not installed here")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compiled_kernels", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 12
    assert {name: taken for name, taken in found.items() if taken > SHARED_BYTES} == {}
