"""A run folder, read: its files in typed records, also while they change or where they are damaged."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from shared.config.load import config_to_json
from shared.config.tree import Config, RunConfig
from shared.errors import RunDirError, UserError
from shared.run import Run
from shared.run.files import LineLog
from shared.run.history import noted
from shared.run.reader import find_runs
from shared.run.run_dir import RunDir
from shared.run.summary import Summary, write_summary
from tests.support.rollouts import rollout_group, rollout_sample, write_groups
from tests.support.run_files import metrics_row, write_run

SUMMARY = Summary(status="running", steps=3, wall_s=1.0, adapter_sha256="ab" * 32)


@pytest.fixture
def made(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config_to_json(Config(run=RunConfig(steps=7))), min_free_bytes=0)


def test_a_new_run_has_nothing_yet(made: RunDir) -> None:
    run = Run(made.path)
    assert run.state() == "new" and run.summary() is None and run.config().run.steps == 7
    assert (len(run.metrics), len(run.rollouts)) == (0, 0)
    assert run.evaluations() == run.checkpoints() == run.quarantine() == run.events() == run.trace() == []
    assert run.phases() == [] and run.logs() == {} and run.log_tail("learner") == []
    info = run.info()
    assert info and len(info.run_id) == 32


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="is not a run directory"):
        Run(tmp_path)


def test_a_run_that_says_running_and_has_no_learner_is_dead(made: RunDir) -> None:
    write_summary(made, SUMMARY)
    run = Run(made.path)
    assert run.state() == "dead"
    with made.locked():
        assert run.state() == "running"
        with pytest.raises(RunDirError, match="in use"), made.locked():
            pass
    assert run.state() == "dead"


def test_evaluations_are_in_the_order_of_their_policies_without_damaged_ones(made: RunDir) -> None:
    write_run(made, status="done", rewards=[0.5], evaluated=["final", "base"])
    (made.eval / "step-000001.json").write_text("{")
    assert {one.label for one in Run(made.path).evaluations()} == {"base", "final"}
    assert Run(made.path).state() == "done"


def test_checkpoints_and_the_best_of_them(made: RunDir) -> None:
    for step in (10, 20):
        folder = made.checkpoints / f"step-{step:06d}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"x" * step)
    (made.checkpoints / "best.json").write_text('{"step": 10, "accuracy": 0.5}')
    found = Run(made.path).checkpoints()
    assert [(one.step, one.num_bytes, one.best) for one in found] == [(10, 10, True), (20, 20, False)]
    (made.checkpoints / "best.json").write_text("[]")
    assert not any(one.best for one in Run(made.path).checkpoints())


def test_refused_batches_say_why(made: RunDir) -> None:
    made.quarantine.mkdir()
    fault = b'{"step": 11, "kind": "spike", "what": "norm 1e9", "sample": "train/000011/0000[2]", "norms": {}}'
    save_file({"fault.json": np.frombuffer(fault, np.uint8)}, made.quarantine / "step-000012.safetensors")
    (made.quarantine / "step-000013.safetensors").write_bytes(b"torn")
    first, second = Run(made.path).quarantine()
    assert (first.step, first.kind, first.what, first.sample) == (12, "spike", "norm 1e9", "train/000011/0000[2]")
    assert (second.step, second.kind, second.num_bytes) == (13, "", 4)


def test_events_come_from_logs_and_files_in_the_order_of_steps(made: RunDir) -> None:
    log = LineLog(made.metrics)
    for step, stage in ((1, 0), (2, 0), (3, 1)):
        log.append(metrics_row(step, 0.5) | {"curriculum/stage": stage})
    (made.logs / "learner.log").write_text(
        "2026-11-23 14:00:00,123 INFO learner begins at step 0 of 7\nnoise\n"
        "2026-11-23 15:00:00,000 INFO learner begins at step 2 of 7\n"
    )
    line = noted(2, "actor0 was killed\n(signal 9); starting it again (1 of 5)")
    (made.logs / "supervisor.log").write_text(f"{line}\n")
    (made.checkpoints / "step-000002").mkdir()
    found = Run(made.path).events()
    assert sorted((one.step, one.kind) for one in found) == [
        *((0, "start"), (2, "checkpoint"), (2, "restart"), (2, "resume"), (3, "stage"))
    ]
    assert [one.step for one in found] == [0, 2, 2, 2, 3]
    texts = {one.kind: one.text for one in found}
    assert texts["restart"] == "actor0 was killed (signal 9); starting it again (1 of 5)"
    start = next(one.at for one in found if one.kind == "start")
    assert start == time.mktime(time.strptime("2026-11-23 14:00:00", "%Y-%m-%d %H:%M:%S"))


def test_phases_fill_a_step_from_its_times(made: RunDir) -> None:
    log = LineLog(made.metrics)
    for step in (1, 2):
        log.append(metrics_row(step, 0.5, time_s=2.0 * step + 10))
    log.append(metrics_row(3, 0.5, **{"time/update_s": None, "time/rollout_s": None}))
    run = Run(made.path)
    found = [(one.process, one.name, one.start_s, one.end_s) for one in run.phases(2, 2)]
    assert found == [
        ("actor", "decode", 12.0, 13.0),
        ("actor", "score", 13.0, pytest.approx(13.1)),
        ("learner", "update", pytest.approx(13.2), 14.0),
    ]
    assert [one.name for one in run.phases(3)] == ["score"]


def test_a_trace_is_read_with_its_torn_end(made: RunDir) -> None:
    begins = event("M", "process_name", 0.5), event("B", "turn", 1e6), event("B", "decode", 2e6)
    ends = event("E", "decode", 3e6), event("E", "turn", 4e6), event("B", "cut", 5e6)
    (made.logs / "trace-actor0.json").write_text("[\n" + "".join(f"{one},\n" for one in (*begins, *ends)) + '{"ph":"E"')
    found = [(one.process, one.name, one.start_s, one.end_s) for one in Run(made.path).trace()]
    assert found == [("actor0", "turn", 1.0, 4.0), ("actor0", "decode", 2.0, 3.0)]


def event(kind: str, name: str, microseconds: float) -> str:
    return f'{{"ph":"{kind}","name":"{name}","pid":1,"tid":1,"ts":{microseconds}}}'


def test_logs_by_name(made: RunDir) -> None:
    (made.logs / "actor0.log").write_text("a\nb\nc\n")
    (made.logs / "stacks-actor0.txt").write_text("stack\n")
    (made.logs / "trace-actor0.json").write_text("[\n")
    run = Run(made.path)
    assert list(run.logs()) == ["actor0", "stacks-actor0"]
    assert run.log_tail("actor0", 2) == ["b", "c"] and run.log_tail("../config") == []


def test_tables_for_a_notebook(made: RunDir) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    write_run(made, status="done", rewards=[0.25, 0.5], evaluated=[])
    write_groups(made.rollouts, [rollout_group(1, ["a b", "c d"], rewards=[1, 0]), rollout_group(2, ["e"])])
    run = Run(made.path)
    assert run.metrics_frame()["reward/mean"].tolist() == [0.25, 0.5]
    samples: Any = run.samples_frame()
    assert samples[["step", "sample", "reward", "fate"]].to_numpy().tolist() == [
        [1, 0, 1.0, "trained"],
        [1, 1, 0.0, "trained"],
        [2, 0, 1.0, "idle"],
    ]
    assert len(run.samples_frame(first=2)) == 1
    tokens: Any = run.tokens_frame(1, 0, 1)
    assert tokens["text"].tolist() == ["c", " d"] and tokens["learner"].tolist() == pytest.approx([-0.499] * 2)
    with pytest.raises(UserError, match="no sample 5 of group 0 in step 1"):
        run.tokens_frame(1, 0, 5)


def test_each_part_of_a_reward_is_a_column_of_its_own(made: RunDir) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    named = [{"score": 1.0, "brevity": 0.25}, {"score": 0.0, "brevity": 0.5}]
    samples = tuple(rollout_sample(text, rewards=parts) for text, parts in zip(("a", "b c"), named, strict=True))
    groups = [structs.replace(rollout_group(1, ["a", "b c"], rewards=[1, 0]), samples=samples), rollout_group(2, ["e"])]
    write_groups(made.rollouts, groups)
    rows: Any = Run(made.path).samples_frame()
    assert rows["reward/score"].tolist()[:2] == [1.0, 0.0]
    assert rows["reward/brevity"].tolist()[:2] == [0.25, 0.5]
    assert rows["reward/brevity"].isna().tolist() == [False, False, True], "the second step has one reward alone"


def test_without_pandas_one_sentence_says_so(made: RunDir, tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("raise ImportError('none here')\n")
    code = f"from shared.run import Run; Run({str(made.path)!r}).metrics_frame()"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("UserError: Tables need pandas, which is not installed; use `pip install pandas`.")
    )


def test_runs_of_a_folder_the_last_written_first(tmp_path: Path) -> None:
    for place, name in enumerate(("old", "new")):
        run = RunDir.create(tmp_path / name, config_to_json(Config()), min_free_bytes=0)
        os.utime(run.config, (1000 + place, 1000 + place))
    (tmp_path / "no run").mkdir()
    assert find_runs(tmp_path) == [tmp_path / "new", tmp_path / "old"]
    assert find_runs(tmp_path / "old") == [tmp_path / "old"]
    assert find_runs(tmp_path / "nowhere") == []


def test_writers_of_a_run_do_not_load_its_reader() -> None:
    code = "import sys, shared.run.files, shared.run.metrics; print('shared.run.reader' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
