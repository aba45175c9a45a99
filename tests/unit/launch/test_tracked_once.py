"""Where a run is tracked is kept, a damaged note stops no tracker, and what is sent of a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from launch.tracking.follow import GROUPS, MetricsSender, corrected_by_tracker, note_tracked, tracked_run, tracking_file
from launch.tracking.trackers import Tracked
from shared.config.load import config_to_json
from shared.config.processes import TrackingConfig
from shared.config.tree import Config
from shared.run.evaluation import write_evaluation
from shared.run.files import LineLog
from shared.run.rollouts import RolloutGroup, pack_group
from shared.run.run_dir import RunDir
from tests.support.fakes import toy_evaluation
from tests.support.rollouts import rollout_group

CONFIG = TrackingConfig(kind="tensorboard")
NOTHING = Tracked(kind="tensorboard", project="tandem", name="run", run_id="0" * 32)


def made_run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config_to_json(Config()))


def test_a_run_stays_where_it_was_first_tracked(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    first = structs.replace(tracked_run(run, CONFIG, {}), name="older name", step=7)
    note_tracked(run, first)
    assert tracked_run(run, CONFIG, {}) == first
    assert tracked_run(run, structs.replace(CONFIG, project="another"), {}).step == 0
    assert tracked_run(run, structs.replace(CONFIG, name="another"), {}).name == "another"


def test_the_environment_of_weights_and_biases_counts_where_nothing_is_configured(tmp_path: Path) -> None:
    run, config = made_run(tmp_path), TrackingConfig(kind="wandb")
    environment = {"WANDB_PROJECT": "sums", "WANDB_NAME": "first"}
    found = tracked_run(run, config, environment)
    assert (found.project, found.name) == ("sums", "first")
    configured = tracked_run(run, structs.replace(config, project="mine", name="own"), environment)
    assert (configured.project, configured.name) == ("mine", "own")
    assert tracked_run(run, CONFIG, environment).project == "tandem"
    # A resumed run stays there, in whatever shell it is resumed.
    note_tracked(run, found)
    assert tracked_run(run, config, {}) == found
    assert tracked_run(run, config, {"WANDB_PROJECT": "other"}) == found
    assert tracked_run(run, structs.replace(config, project="mine"), {}).project == "mine"


def test_a_name_in_trackio_belongs_to_one_run(tmp_path: Path) -> None:
    run, config = made_run(tmp_path), TrackingConfig(kind="trackio", name="baseline")
    first = tracked_run(run, config, {})
    assert first.name == f"baseline-{run.read_info().run_id[:8]}"
    note_tracked(run, structs.replace(first, step=3))
    assert tracked_run(run, config, {}).step == 3
    # Of a run that was tracked under the name alone.
    note_tracked(run, structs.replace(first, name="baseline", step=4))
    assert tracked_run(run, config, {}).step == 4
    assert tracked_run(run, structs.replace(config, kind="wandb"), {}).name == "baseline"


def test_a_tracker_that_has_lost_steps_gets_them_again() -> None:
    noted = structs.replace(NOTHING, step=7, evaluated=(7,))
    assert corrected_by_tracker(noted, None) == noted, "it cannot be asked"
    assert corrected_by_tracker(noted, 7) == noted
    assert corrected_by_tracker(noted, 9) == structs.replace(noted, step=9)
    assert corrected_by_tracker(noted, 0) == NOTHING


def test_a_damaged_note_is_one_that_is_not_there(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    asked = tracked_run(run, CONFIG, {})
    for damaged in (b"", b'{"kind": "tensor', b"\0" * 200, b"[" * 100_000):
        tracking_file(run).write_bytes(damaged)
        assert tracked_run(run, CONFIG, {}) == asked


class Told:
    """A tracker that remembers how many groups came with each step, and what came without one."""

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}
        self.added: list[tuple[int, float, float]] = []

    def last_step(self) -> int:
        return 0

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None:
        self.groups[step] = len(rollouts)

    def add(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        self.added.append((step, figures["eval/greedy"], time_s))

    def close(self) -> None:
        pass


def test_every_step_is_sent_and_groups_every_five_seconds_at_most(tmp_path: Path) -> None:
    run, told = made_run(tmp_path), Told()
    rollouts = LineLog(run.rollouts)
    for step in range(1, 8):
        for slot in range(3):
            rollouts.append_line(pack_group(rollout_group(step, ["answer"], slot=slot)))
    rollouts.close()
    sender = MetricsSender(run, told, NOTHING)
    # The last one is of a run that went on with a clock that was set back.
    for step, time_s in enumerate((10.0, 12.0, 14.9, 15.0, 16.2, 24.0, 3.0), start=1):
        sender.send({"step": step, "time_s": time_s, "loss": 0.5})
    assert told.groups == {1: GROUPS, 2: 0, 3: 0, 4: GROUPS, 5: 0, 6: GROUPS, 7: GROUPS}


def test_evaluations_that_no_row_has_shown_are_sent_once_at_the_end(tmp_path: Path) -> None:
    run, told = made_run(tmp_path), Told()
    for label, version in (("base", 0), ("step-000002", 2), ("final", 4), ("final-test", 4)):
        write_evaluation(run.eval, toy_evaluation([True, version == 4], label=label, version=version))
    sender = MetricsSender(run, told, NOTHING)
    for step, evaluated in enumerate((0, None, None, None), start=1):
        sender.send({"step": step, "time_s": 2.0 * step, "eval/step": evaluated})
    sender.send_unshown_evaluations()
    assert told.added == [(2, 0.5, 8.0), (4, 1.0, 8.0)]
    again = MetricsSender(run, told, sender.tracked())
    again.send({"step": 1, "time_s": 2.0, "eval/step": 0})
    again.send_unshown_evaluations()
    assert len(told.added) == 2


def test_an_evaluation_in_a_row_that_was_sent_without_it_is_sent_at_the_end(tmp_path: Path) -> None:
    run, told, metrics = made_run(tmp_path), Told(), LineLog(tmp_path / "run" / "metrics.jsonl")
    write_evaluation(run.eval, toy_evaluation([True], label="step-000001", version=1))
    sender = MetricsSender(run, told, NOTHING)
    metrics.append({"step": 1, "time_s": 2.0})
    metrics.append({"step": 2, "time_s": 4.0})
    sender.send_new_steps()
    # With eval.beside, a resumed run may write the row again with an evaluation that has come meanwhile.
    metrics.truncate_from(2)
    metrics.append({"step": 2, "time_s": 5.0, "eval/step": 1})
    sender.send_new_steps()
    sender.send_unshown_evaluations()
    assert told.added == [(1, 1.0, 5.0)]
