"""What an actor has while it decodes: its adapter once, in the type it computes with, and not the memory that prompts
and a new adapter took. That is measured in a process of its own, since a heap has one history."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actor.engines.hf_engine import KEPT_WHILE_DECODING, HFEngine
from actor.wiring import build_engine
from launch.presets.load import load_config

DECODES = """
import sys
from pathlib import Path
from actor.engines.hf_engine import HFEngine
from shared.process.free_memory import own_bytes
from tests.support.fakes import tiny_policy, tiny_prompter
from tests.unit.actor.test_hf_engine import orders, sampling, silent

engine = HFEngine(tiny_policy(Path(sys.argv[1])), tiny_prompter())
engine.generate(orders(), sampling(), silent)
left = own_bytes()
blocks = [bytearray(50_000) for _ in range(int(sys.argv[2]) // 50_000)]
# The heap cannot shrink below those that stay.
kept = blocks[::100]
del blocks
grown = own_bytes() - left
seen = []
engine.generate(orders(), sampling(), lambda ended: seen.append(own_bytes() - left))
print(grown, seen[0])
"""


@pytest.mark.long
@pytest.mark.parametrize("freed", [4 * KEPT_WHILE_DECODING, KEPT_WHILE_DECODING // 4], ids=["much", "little"])
def test_what_is_free_before_the_first_token_is_returned_if_it_is_much(checkpoint: Path, freed: int) -> None:
    argv = [sys.executable, "-c", DECODES, str(checkpoint), str(freed)]
    grown, seen = map(int, subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert grown > 0.9 * freed
    assert (seen < 0.2 * grown) == (freed > KEPT_WHILE_DECODING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_kept_in_the_type_that_is_computed_with(dtype: torch.dtype) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    threads = ("compute.learner_threads=1", "compute.actor_threads=1")
    engine, _ = build_engine(load_config("embedded", (*threads, "compute.device=cpu", f"compute.dtype={name}")))
    assert isinstance(engine, HFEngine)
    assert {value.dtype for value in engine.policy.adapter.parameters().values()} == {dtype}
