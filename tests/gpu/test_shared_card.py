"""One copy of the base on a card for two processes. Skips where the driver or the container does not allow it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shared.base.block import CudaBlocks
from tests.support.runs import ROOT, SMALL, kill, launch, num_rows, processes_of, sets, start, summary, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]
KEYS = SMALL | {"compute.device": "cuda"}
MIB = 2**20
SIZE = 1024 * MIB

OTHER = """
import json, sys
import torch
from shared.base.block import CudaBlocks
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
before = torch.cuda.mem_get_info()[0]
try:
    block = CudaBlocks(torch.device("cuda", 0)).open(bytes.fromhex(sys.argv[1]))
except RuntimeError as error:
    print(json.dumps({"reason": str(error).splitlines()[0]}))
    sys.exit()
block[1] = 77
found = {"bytes": len(block), "first": int(block[0]), "sum": int(block.view(torch.int64).sum())}
torch.cuda.synchronize()
print(json.dumps(found | {"taken": before - torch.cuda.mem_get_info()[0]}))
"""


@pytest.fixture(scope="module")
def seen(card: torch.device) -> dict[str, int]:
    """By another process, of a block of ours; it writes a byte, which we see."""
    blocks = CudaBlocks(torch.device("cuda", 0))
    try:
        block = blocks.make(SIZE).fill_(3)
        torch.cuda.synchronize()
        handle = blocks.handle(block)
    except RuntimeError as error:
        pytest.skip(f"its memory cannot be shared here: {error}")
    done = subprocess.run(
        [sys.executable, "-c", OTHER, handle.hex()], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    if "reason" in found:
        pytest.skip(f"another process cannot map it here: {found['reason']}")
    torch.cuda.synchronize()
    assert int(block[1]) == 77
    return found


def test_another_process_sees_the_same_bytes_and_takes_no_memory_for_them(seen: dict[str, int]) -> None:
    assert (seen["bytes"], seen["first"]) == (SIZE, 3)
    threes, written = (int.from_bytes(word, "little") for word in (bytes([3] * 8), bytes([3, 77, *[3] * 6])))
    # As PyTorch sums, modulo 2^64 and with a sign.
    total = (threes * (SIZE // 8 - 1) + written) % 2**64
    assert seen["sum"] % 2**64 == total
    assert seen["taken"] < 64 * MIB


def log_of(out: Path, process: str) -> str:
    return (out / "logs" / f"{process}.log").read_text()


def test_an_actor_that_is_killed_borrows_again(seen: dict[str, int], tmp_path: Path) -> None:
    straight, out = tmp_path / "straight", tmp_path / "run"
    keys = sets(KEYS | {"compute.residency": "shared"})
    done = launch("run", "embedded", "--out", straight, *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    launcher = start("run", "embedded", "--out", out, *keys)
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    kill(processes_of(out, "actor"))
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    assert summary(out)["adapter_sha256"] == summary(straight)["adapter_sha256"]
    for folder in (straight, out):
        assert "one copy for both processes" in log_of(folder, "learner")
        assert "the base is not shared" not in log_of(folder, "learner") + log_of(folder, "actor0")


def test_an_actor_without_its_learner_ends(seen: dict[str, int], tmp_path: Path) -> None:
    """The launcher would end it too, so it is started here."""
    out = tmp_path / "run"
    sizes = {"run.steps": 200, "compute.residency": "shared", "link.silence_s": 20.0, "link.heartbeat_s": 1.0}
    assert launch("run", "embedded", "--prepare", "--out", out, *sets(KEYS | sizes)).returncode == 0
    words = {"learner": ("learner", "--run", str(out)), "actor0": ("actor", "--run", str(out), "--id", "actor0")}
    running: list[subprocess.Popen[bytes]] = []
    for name, of in words.items():
        with (out / "logs" / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen([sys.executable, "-m", *of], cwd=ROOT, stdout=log, stderr=log))
    learner, actor = running
    wait_until(lambda: num_rows(out) >= 1, "a step", seconds=300)
    learner.kill()
    learner.wait()
    killed = time.monotonic()
    assert actor.wait(timeout=120) == 1 and time.monotonic() - killed < 60
    said = log_of(out, "actor0")
    assert said.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in said
