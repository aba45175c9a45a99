"""What learner and actor are forked from must not have touched a card: CUDA does not survive a fork.

One import of bitsandbytes or one question to torch.cuda while libraries are loaded, and every forked child fails with
"Cannot re-initialize CUDA in forked subprocess". Runs without a card too: whatever asks for one is noted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.commands.run import make_run
from launch.presets.load import load_config
from shared.base.cache import cached_base
from shared.process.determinism import cpu_environment
from tests.support.runs import ROOT

QUESTIONS = ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties")
PRELOAD = f"""
import json, os, sys, threading, traceback
import torch

# As in a build for NVIDIA cards, where libraries ask more.
torch.version.cuda = "13.0"
asked = []


def noted(name, answer):
    def ask(*words, **named):
        asked.append([name, traceback.format_stack(limit=4)[0].strip().splitlines()[0]])
        return answer(*words, **named)

    return ask


for name in {QUESTIONS!r}:
    setattr(torch.cuda, name, noted(name, getattr(torch.cuda, name)))
if {{planted}}:
    torch.cuda.is_available()

from launch.supervisor.fork_server import preload

from pathlib import Path
from shared.model.prompt import load_tokenizer

preload(Path(sys.argv[1]))
own = ("actor", "learner", "launch", "protocol", "shared")
# PyTorch itself may import Triton, which asks for nothing. Our kernels are loaded where they are used.
heavy = [name for name, module in sys.modules.items() if name.split(".")[0] in own and hasattr(module, "triton")]
heavy += ["bitsandbytes"] if "bitsandbytes" in sys.modules else []
threads = len(os.listdir("/proc/self/task"))
tokenizers = load_tokenizer.cache_info().currsize
found = {{{{"asked": asked, "heavy": heavy, "threads": threads, "tokenizers": tokenizers}}}}
print(json.dumps(found | {{{{"started": torch.cuda.is_initialized()}}}}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A prepared run of a model that was converted."""
    config = load_config("embedded", [])
    cached_base(config.model)
    return make_run(tmp_path / "run", config).path


def preloaded(run: Path, *, planted: bool) -> dict[str, Any]:
    code = PRELOAD.format(planted=planted)
    environment = os.environ | cpu_environment(1, "fast")
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="forking is for Linux alone")
def test_loading_the_libraries_asks_for_no_card(run: Path) -> None:
    found = preloaded(run, planted=False)
    assert found["asked"] == []
    assert found["heavy"] == []
    assert found["started"] is False
    assert found["tokenizers"] == 1
    assert found["threads"] == 1, "another thread would not be in the children"


def test_a_question_would_be_noticed(run: Path) -> None:
    assert [name for name, _ in preloaded(run, planted=True)["asked"]][:1] == ["is_available"]
