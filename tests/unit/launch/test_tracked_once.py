"""Where a run is tracked is kept, a damaged note stops no tracker, and what is sent of a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from launch.tracking.follow import GROUPS, MetricsSender, note_tracked, tracked_run, tracking_file
from shared.config.load import config_to_json
from shared.config.processes import TrackingConfig
from shared.config.tree import Config
from shared.run.files import LineLog
from shared.run.rollouts import RolloutGroup, pack_group
from shared.run.run_dir import RunDir
from tests.support.rollouts import rollout_group

CONFIG = TrackingConfig(kind="tensorboard")


def test_a_run_stays_where_it_was_first_tracked(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()))
    first = structs.replace(tracked_run(run, CONFIG), name="older name", step=7)
    note_tracked(run, first)
    assert tracked_run(run, CONFIG) == first
    assert tracked_run(run, structs.replace(CONFIG, project="another")).step == 0


def test_a_damaged_note_is_one_that_is_not_there(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()))
    asked = tracked_run(run, CONFIG)
    for damaged in (b"", b'{"kind": "tensor', b"\0" * 200, b"[" * 100_000):
        tracking_file(run).write_bytes(damaged)
        assert tracked_run(run, CONFIG) == asked


class Told:
    """A tracker that remembers how many groups came with each step."""

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}

    def last_step(self) -> int:
        return 0

    def log(self, step: int, figures: Mapping[str, float], rollouts: Sequence[RolloutGroup]) -> None:
        self.groups[step] = len(rollouts)

    def close(self) -> None:
        pass


def test_every_step_is_sent_and_groups_every_five_seconds_at_most(tmp_path: Path) -> None:
    run, told = RunDir.create(tmp_path / "run", config_to_json(Config())), Told()
    rollouts = LineLog(run.rollouts)
    for step in range(1, 8):
        for slot in range(3):
            rollouts.append_line(pack_group(rollout_group(step, ["answer"], slot=slot)))
    rollouts.close()
    sender = MetricsSender(run, told, last_step=0)
    # The last one is of a run that went on with a clock that was set back.
    for step, time_s in enumerate((10.0, 12.0, 14.9, 15.0, 16.2, 24.0, 3.0), start=1):
        sender.send({"step": step, "time_s": time_s, "loss": 0.5})
    assert told.groups == {1: GROUPS, 2: 0, 3: 0, 4: GROUPS, 5: 0, 6: GROUPS, 7: GROUPS}
