"""summary.json comes back as what was written, and a damaged one is told."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from shared.errors import DamageError
from shared.run.forecast import Figures, measured, planned_on_card, read_prediction, write_prediction
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
    assert list(raw) == ["status", "steps", "wall_s", "adapter_sha256", "predicted", "measured", "eval", "why"]
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
