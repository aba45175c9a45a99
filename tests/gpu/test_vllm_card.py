"""What only a card can show of vLLM: the learner really gets the memory, and the numbers are the same afterwards.

tests/run.sh gpu        (after `pip install -e .[dev,vllm]`; skipped without a card)
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA card here"),
]


@pytest.mark.parametrize("part", ["kv", "weights", "stop"])
def test_what_is_given_back_is_free_and_comes_back_whole(part: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the extra `vllm` is not installed here")
    from actor.wiring import build_engine
    from launch.presets.load import load_config
    from shared.base.cache import cached_base
    from shared.model.adapter_file import adapter_bytes, read_layout
    from shared.model.canary import canary_ids

    sets = ("actor.engine=vllm", f"actor.give_back={part}", "actor.kv_mb=512", "compute.device=cuda")
    config = load_config("embedded", sets)
    engine: Any = build_engine(config)[0]
    adapter = read_layout(cached_base(config.model).folder, config.lora).adapter()
    adapter.initialise(0)
    engine.install(0, adapter_bytes(adapter))
    ids = canary_ids(0, 500, 32)
    before, awake = engine.logprobs(ids), torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 400 * 2**20, "keys and values alone are 512 MiB"
    assert engine.wake() is True
    np.testing.assert_allclose(engine.logprobs(ids), before, atol=0.05)
