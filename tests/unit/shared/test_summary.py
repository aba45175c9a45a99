"""summary.json comes back as what was written, and a damaged one is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from shared.errors import DamageError
from shared.run.forecast import Figures, Spent, measured, planned_on_card, read_prediction, spent, write_prediction
from shared.run.metrics import MetricsTable
from shared.run.run_dir import RunDir
from shared.run.summary import Summary, read_summary, write_summary
from tests.support.fakes import toy_evaluation

SUMMARY = Summary(status="done", steps=40, wall_s=61.7, adapter_sha256="ab" * 32)


def test_what_is_written_is_read_without_the_results_of_single_tasks(tmp_path: Path) -> None:
    run, final = RunDir(tmp_path), toy_evaluation([True, False])
    assert read_summary(run) is None
    write_summary(run, structs.replace(SUMMARY, eval={"final": final}))
    assert read_summary(run) == structs.replace(SUMMARY, eval={"final": structs.replace(final, task_results=())})
    raw = json.loads(run.summary.read_bytes())
    figures = ["predicted", "measured", "spent", "eval", "why", "actors"]
    assert list(raw) == ["status", "steps", "wall_s", "adapter_sha256", *figures, "error"]
    assert raw["actors"] == {"actors": {}, "limited": {}}, "one actor has nobody to be compared with"
    assert raw["eval"]["final"]["greedy"]["accuracy"] == 0.5


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"status": "asleep", "steps": 1, "wall_s": 1, "adapter_sha256": ""}']
)
def test_a_damaged_one_is_told_in_one_sentence(content: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.summary.write_text(content)
    with pytest.raises(DamageError, match=r"summary\.json cannot be read .*`resume` writes it again") as caught:
        read_summary(run)
    assert "\n" not in str(caught.value)
    run.summary.write_text(json.dumps({"status": "done", "steps": 1, "wall_s": 1, "adapter_sha256": "", "mine": 2}))
    assert read_summary(run) == Summary(status="done", steps=1, wall_s=1, adapter_sha256="")


def rows_of(rewards: list[float | None], **changes: Any) -> list[dict[str, Any]]:
    """Steps of 2 s: 1 s rollout, 0.1 s verify, 0.05 s swap, 0.8 s update, 0.05 s idle, 30 J."""
    times = {"rollout": 1.0, "verify": 0.1, "swap": 0.05, "update": 0.8, "idle": 0.05, "step": 2.0}
    fixed = {f"time/{name}_s": amount for name, amount in times.items()} | {"energy/cpu_j": 30.0}
    return [{"step": place + 1, "reward/mean": one} | fixed | changes for place, one in enumerate(rewards)]


def spent_of(path: Path, rows: list[dict[str, Any]], **unread: str) -> Spent:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return spent(MetricsTable(path), unread)


RISES: list[float | None] = [0.1, 0.2, 0.3, 0.2, 0.2, 0.9, 0.4, 0.4, 0.5, 0.4, 0.3]


def test_time_and_energy_of_a_point_of_reward(tmp_path: Path) -> None:
    """Last five 0.4, first five 0.2: 20 points in 11 steps."""
    found = spent_of(tmp_path / "m", rows_of(RISES), card="absent")
    assert found.points == pytest.approx(20.0)
    assert found.seconds == {"rollout": 11, "verify": 1.1, "swap": 0.55, "update": 8.8, "idle": 0.55, "step": 22}
    assert found.seconds_per_point == pytest.approx({name: s / 20 for name, s in found.seconds.items()})
    assert (found.joules, found.unread) == ({"cpu": 330.0}, {"card": "absent"})
    assert found.joules_per_point == pytest.approx({"cpu": 16.5})


def test_ten_steps_are_enough_for_points(tmp_path: Path) -> None:
    """Last five 0.52, first five 0.2."""
    assert spent_of(tmp_path / "m", rows_of(RISES[:10])).points == pytest.approx(32.0)


@pytest.mark.parametrize(
    "rewards",
    [RISES[:9], RISES[::-1], [0.5] * 12, [None] * 12, [*RISES[:10], None], []],
    ids=["few", "falls", "flat", "no rewards", "one unknown", "no steps"],
)
def test_without_a_gain_nothing_has_a_price(rewards: list[float | None], tmp_path: Path) -> None:
    found = spent_of(tmp_path / "m", rows_of(rewards))
    assert found.points is None and found.seconds_per_point == found.joules_per_point == {}
    assert found.seconds.get("step", 0.0) == 2.0 * len(rewards)


def test_a_step_that_was_not_counted_makes_no_sum(tmp_path: Path) -> None:
    rows = rows_of(RISES)
    rows[3] |= {"energy/cpu_j": None, "time/swap_s": None}
    found = spent_of(tmp_path / "m", rows, card="forbidden", cpu="absent")
    assert found.joules == found.joules_per_point == {} and "swap" not in found.seconds
    assert found.unread == {"card": "forbidden", "cpu": "partly"}


def test_what_was_measured_comes_from_the_rows_of_the_steps(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert measured(run) is None and read_prediction(run) is None
    rows = [{"time/step_s": t, "mem/learner_mb": 100 * t, "length/mean": 10.0, "mem/actor_mb": None} for t in (3, 1, 2)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\0\0\n{")
    assert measured(run) == Figures(step_s=2.0, learner_mb=300.0, completion_tokens=10.0)
    predicted = Figures(step_s=1.5, learner_mb=310.0, all_mb=700.0)
    write_prediction(run, predicted)
    assert read_prediction(run) == predicted
    assert (planned_on_card(run, "learner"), planned_on_card(run, "actor")) == (0, 0)
    write_prediction(run, Figures(learner_reserved_mb=2000.0, actor_reserved_mb=0.5))
    assert (planned_on_card(run, "learner"), planned_on_card(run, "actor")) == (2000 * 2**20, 2**19)
    run.plan.write_bytes(b"{")
    assert read_prediction(run) is None and planned_on_card(run, "actor") == 0, "nothing depends on it"
