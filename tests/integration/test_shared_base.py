"""A real process that computes with the base of another one, which is then killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actor.engines.engine import Engine
from protocol.messages import GroupOrder, Sampling
from shared.process.determinism import cpu_environment
from tests.support.fakes import unheard
from tests.support.runs import ROOT

KEYS = [
    "compute.device=cpu",
    "compute.dtype=fp32",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
    "model.dequantize=each_call",
]

LENDER = """
import sys, time
from pathlib import Path
from launch.presets.load import load_config
from learner.wiring import load_trained_policy
from shared.base.lending import Lender
from tests.support.host_blocks import CARD, HostBlocks

folder, keys = Path(sys.argv[1]), sys.argv[2:]
lender = Lender(folder, HostBlocks(folder), CARD)
assert lender.offer() == ""
load_trained_policy(load_config("embedded", keys), "cpu", place=lender.place)
time.sleep(600)
"""

BORROWER = """
import sys, time
from pathlib import Path
from actor.wiring import build_engine
from launch.presets.load import load_config
from shared.base.lending import Borrower
from shared.process.entry_point import run_process
from tests.integration.test_shared_base import sampled
from tests.support.host_blocks import CARD, HostBlocks

folder, keys = Path(sys.argv[1]), sys.argv[2:]

def body():
    borrower = Borrower(folder, HostBlocks(folder), CARD)
    assert borrower.ask(120.0) == ""
    engine, _ = build_engine(load_config("embedded", keys), borrower)
    print(sampled(engine), flush=True)
    while True:
        engine.sleep()
        time.sleep(0.01)
        engine.wake()

sys.exit(run_process("actor0", body))
"""

ALONE = """
import sys
from actor.wiring import build_engine
from launch.presets.load import load_config
from tests.integration.test_shared_base import sampled

_, *keys = sys.argv[1:]
engine, _ = build_engine(load_config("embedded", keys))
print(sampled(engine))
"""


def sampled(engine: Engine) -> str:
    """Tokens and log-probs of an order, as hexadecimal digits."""
    order = GroupOrder(group_id="g", prompt_ids=np.arange(6, 15, dtype=np.int32), columns={}, seeds=(1, 2, 3))
    (found,) = engine.generate((order,), Sampling(temperature=1.0, max_new_tokens=12), unheard)
    return b"".join(one.ids.tobytes() + one.logprobs.tobytes() for one in found).hex()


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """With the threads and kernels of a run, so that the bits are the same in each process."""
    argv, environment = [sys.executable, "-c", code, str(folder), *KEYS], os.environ | cpu_environment(1, "fast")
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.long
def test_it_samples_the_same_and_ends_when_the_owner_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "lease"
    folder.mkdir()
    with start(LENDER, folder) as lender, start(BORROWER, folder) as borrower:
        assert borrower.stdout is not None
        found = borrower.stdout.readline().strip()
        lender.send_signal(signal.SIGKILL)
        _, said = borrower.communicate(timeout=60)
    with start(ALONE, folder) as alone:
        expected, _ = alone.communicate(timeout=60)
    assert found and found == expected.strip()
    assert borrower.returncode == 1 and "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last == "error: The learner, whose copy of the base this actor computes with, has ended."
