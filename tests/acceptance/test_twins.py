"""The embedded twin of every preset, for a few steps: the curriculum, verifier, objective and code of the real one."""

from pathlib import Path
from typing import Any

import pytest

from launch.presets.load import PRESETS_DIR
from tests.support.runs import launch, rows, sets, summary

TWINS = sorted(path.stem for path in PRESETS_DIR.glob("*_embedded.toml"))
QUICK = ("gsm8k_8gb_embedded", "continual_3stage_embedded")
"""The others are long: each is a whole run."""
FEW = {
    "run.steps": 3,
    "tasks.limit": 24,
    "rollout.prompts": 4,
    "rollout.group": 4,
    "rollout.groups_per_order": 2,
    "rollout.max_new_tokens": 32,
    "verifier.workers": 1,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
}


@pytest.mark.parametrize(
    "twin", [pytest.param(twin, marks=[] if twin in QUICK else pytest.mark.long) for twin in TWINS]
)
def test_a_twin_trains(tmp_path: Path, twin: str) -> None:
    out, overrides = tmp_path / "run", sets(FEW | ({"curriculum.stage_steps": 2} if "3stage" in twin else {}))
    if "sent" in twin:
        measured = launch("curriculum", twin, *overrides)
        assert measured.returncode == 0, measured.stdout + measured.stderr
    done = launch("run", twin, "--out", out, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(out)["status"] == "done"
    found = rows(out)
    assert [row["step"] for row in found] == [1, 2, 3]
    check(twin, found)


def check(twin: str, found: list[dict[str, Any]]) -> None:
    """What the preset is for happened: updates, a mask, a constraint, a stage that ended and holds the next."""
    updated = [row for row in found if row["grad_norm"] is not None]
    masked, constrained = "8gb" in twin, "sent" in twin
    in_bf16 = masked or constrained
    assert updated and all(row["mismatch/p99"] <= (0.05 if in_bf16 else 1e-4) for row in updated)
    assert all((row["selected/fraction"] < 0.25) == masked for row in updated)
    assert all((row["constraint/fraction"] is not None) == constrained for row in updated)
    if "3stage" in twin:
        assert [row["curriculum/stage"] for row in found] == [0, 1, 1]
        assert found[2]["ewc/penalty"] > 0
