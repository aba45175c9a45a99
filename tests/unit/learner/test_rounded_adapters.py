"""Training whose actors get adapters in bf16: the learner goes on from its own values, and nothing depends on luck."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.config.processes import LinkConfig
from shared.config.tree import Config
from tests.unit.learner.test_training_in_process import Run, config_for, saved

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Callable[[Config], Run]:
    return lambda config: Run(checkpoint, tmp_path, config)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_rounded_adapters_repeat_and_resume_and_differ_little(max_lag: int, start: Callable[[Config], Run]) -> None:
    exact = start(config_for(max_lag=max_lag)).train()
    config = replace(config_for(max_lag=max_lag, max_mismatch=0.0), link=LinkConfig(adapter_dtype="bf16"))
    undisturbed = start(config)
    digest = undisturbed.train()
    assert digest != exact and start(config).train() == digest
    stopped, resumed = start(config), start(config)
    stopped.train(last=3)
    resumed.load(stopped.files.checkpoints[3])
    assert resumed.train(first=3) == digest
    assert saved(resumed) == saved(undisturbed)
    if max_lag == 0:
        mismatches = [row.mismatch_p99 for row in undisturbed.files.rows]
        assert 1e-4 < max(mismatches) < 0.01, "actors sampled from what is not quite the policy"
