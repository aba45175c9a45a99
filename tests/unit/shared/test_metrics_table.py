"""metrics.jsonl as columns while it grows."""

import math
from pathlib import Path

import numpy as np
import pytest

from shared.run.files import BLOCK, LineLog
from shared.run.metrics import MetricsTable


def write(path: Path, steps: range, **figures: float | None) -> None:
    log = LineLog(path)
    for step in steps:
        log.append({"step": step, "reward/mean": step / 10, "kl": None, **figures})
    log.close()


def test_rows_become_columns_and_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = MetricsTable(path)
    assert len(table) == 0 and table.keys() == [] and table.column("step").tolist() == []
    write(path, range(1, 4))
    assert table.keys() == ["step", "reward/mean", "kl"]
    assert table.column("step").tolist() == [1, 2, 3] and table.column("reward/mean").tolist() == [0.1, 0.2, 0.3]
    assert np.isnan(table.column("kl")).all() and np.isnan(table.column("unknown")).all()
    write(path, range(4, 6), late=7.0)
    assert len(table) == 5
    assert table.column("late").tolist()[3:] == [7.0, 7.0] and np.isnan(table.column("late")[:3]).all()
    assert table.row(-1) == {"step": 5, "reward/mean": 0.5, "kl": None, "late": 7.0}
    assert [row["step"] for row in table.rows()] == [1, 2, 3, 4, 5]


def test_damaged_lines_are_counted_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n\0\0\0\n{"step":"two"}\n[3]\n{"step":4}\n{"step":5')
    table = MetricsTable(path)
    assert table.column("step").tolist() == [1, 4] and table.damaged == 3
    with path.open("ab") as file:
        file.write(b"}\n")
    assert table.column("step").tolist() == [1, 4, 5]


def test_dropped_rows_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6), only_once=1.0)
    table = MetricsTable(path)
    assert len(table) == 5
    LineLog(path).truncate_from(3)
    write(path, range(3, 5))
    assert table.column("step").tolist() == [1, 2, 3, 4] and table.generation == 1
    assert math.isnan(table.column("only_once")[3])
    LineLog(path).truncate_from(1)
    assert len(table) == 0 and table.keys() == []


def test_a_long_file_is_read_in_blocks(tmp_path: Path) -> None:
    path, steps = tmp_path / "metrics.jsonl", 30_000
    with path.open("wb") as file:
        file.writelines(b'{"step":%d,"loss":0.125,"x":%d.0}\n' % (step, step) for step in range(1, steps + 1))
    assert path.stat().st_size > BLOCK
    table = MetricsTable(path)
    assert len(table) == steps and table.column("x").sum() == steps * (steps + 1) / 2


class Growing(MetricsTable):
    """Of a run that logs a step whenever a column is read."""

    def known_column(self, key: str) -> np.ndarray:
        with self.file.path.open("ab") as file:
            file.write(b'{"step":%d,"reward/mean":0.5}\n' % (self.known + 1))
        return super().known_column(key)


def test_columns_that_belong_together_are_of_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11))
    table = Growing(path)
    assert {len(column) for column in table.whole().values()} == {10}
    curve = table.thinned(["reward/mean"], 100)["reward/mean"]
    assert len(curve.step) == len(curve.mean) > 10


@pytest.mark.parametrize("points", [1, 7, 100, 1000])
def test_a_thinned_curve_keeps_means_and_extremes(points: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 101))
    thin = MetricsTable(path).thinned(["reward/mean", "kl"], points)
    curve, empty = thin["reward/mean"], thin["kl"]
    assert len(curve.step) == min(points, 100) and curve.step[-1] == 100
    low, high = [x for x in curve.low if x is not None], [x for x in curve.high if x is not None]
    assert (min(low), max(high)) == (0.1, 10.0)
    sizes = np.diff([0, *curve.step])
    assert float(np.dot(sizes, [x or 0.0 for x in curve.mean])) == pytest.approx(505.0)
    assert empty.mean == [None] * len(curve.step)
