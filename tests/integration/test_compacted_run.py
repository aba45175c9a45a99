"""A run whose journal gives up what no kept checkpoint needs: same adapter, and a replay that says where it begins."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    SMALL,
    dotted,
    kill,
    launch,
    num_rows,
    processes_of,
    replayed,
    sets,
    start,
    summary,
    train,
    wait_until,
)

AHEAD = {"pipeline__max_lag": 2, "rollout__groups_per_order": 2, "rollout__replacement_rounds": 1}
STEPS = 12
"""So many that a run killed behind the third has journaled none of the last: what it has journaled can go."""
COMPACTED = {
    "run__steps": STEPS,
    "journal__keep": "checkpoints",
    "checkpoint__every": 1,
    "checkpoint__keep": 2,
    **AHEAD,
}


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "compacted"
    return out, train(out, **COMPACTED)


def segments(out: Path) -> list[int]:
    return sorted(int(path.stem) for path in (out / "journal").glob("*.log"))


@pytest.mark.long
def test_a_replay_goes_from_the_oldest_checkpoint_that_the_journal_reaches(
    compacted: tuple[Path, dict[str, Any]],
) -> None:
    out, expected = compacted
    assert min(segments(out)) > 1 and len(segments(out)) < STEPS
    report = replayed(out)
    assert 0 < report["from_step"] < report["steps"] == STEPS and report["match"] is True
    assert report["adapter_sha256"] == expected["adapter_sha256"]


@pytest.mark.long
def test_a_whole_journal_that_is_compacted_after_a_kill_ends_the_same(
    tmp_path: Path, compacted: tuple[Path, dict[str, Any]]
) -> None:
    out = tmp_path / "run"
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | dotted(COMPACTED | {"journal__keep": "all"})))
    wait_until(lambda: num_rows(out) >= 3, "the third step")
    kill(processes_of(out, "learner"))
    launcher.communicate(timeout=60)
    assert min(segments(out)) == 1
    config = json.loads((out / "config.json").read_text())
    config["journal"]["keep"] = "checkpoints"
    (out / "config.json").write_text(json.dumps(config))
    resumed = launch("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert summary(out)["adapter_sha256"] == compacted[1]["adapter_sha256"]
    assert min(segments(out)) > 1 and replayed(out)["from_step"] > 0


@pytest.mark.long
def test_a_lost_segment_is_told(compacted: tuple[Path, dict[str, Any]]) -> None:
    out = compacted[0]
    lost = out / "journal" / f"{min(segments(out)):06d}.log"
    lost.unlink()
    done = launch("replay", out)
    assert done.returncode != 0
    assert f"{lost.name} is missing though the journal begins with it" in done.stdout + done.stderr
