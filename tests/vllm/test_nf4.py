"""The learner's own NF4 codes in real vLLM, through the plugin: used unchanged, computed in bf16."""

from pathlib import Path

import pytest

from actor.engines.vllm_options import PLUGIN, version_of
from tests.support.runs import SMALL, launch, replayed, rows, sets

CODES = SMALL | {"actor.engine": "vllm", "actor.weights": "nf4", "run.steps": 3, "rollout.max_new_tokens": 48}

pytestmark = pytest.mark.skipif(version_of(PLUGIN) is None, reason=f"{PLUGIN} is not installed here")


def test_it_trains_as_far_apart_as_bf16_is_from_fp32(tmp_path: Path) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(CODES | {"loss.max_mismatch": 0.5}))
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[float] = [row["mismatch/p99"] for row in rows(tmp_path / "run") if row["mismatch/p99"] is not None]
    # Other codes, or codes read in another order, are nats apart.
    assert found and 1e-4 < min(found) <= max(found) < 0.2
    assert replayed(tmp_path / "run")["match"] is True


@pytest.mark.long
def test_with_the_bound_of_fp32_it_is_refused_and_the_likely_cause_named(tmp_path: Path) -> None:
    done = launch("run", "embedded", "--out", tmp_path / "run", *sets(CODES | {"loss.max_mismatch": 1e-3}))
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "nothing was learned from them. Likely cause: another compute type" in said
